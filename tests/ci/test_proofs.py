"""Keys of proofs: what belongs to one, what changes it, and what is refused."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import proofs
import pytest
from module_graph import ModuleGraph
from proofs import Keys, Proof, differences, main, read_table, sampled

from tests import conftest
from tests.ci.repositories import repository
from tests.data_paths import ROOT

BLOCKS = '''TABLE = "ingot.runtime.kv.tiers:Tiers"


class Blocks:
    """Blocks."""

    SIZE = 16
'''
FILES = {
    "tests/conftest.py": "from ingot.passes.base import Pass\n",
    "tests/test_kv.py": "from ingot.runtime import Blocks\n",
    "runtime/__init__.py": "from ingot.runtime.engine import Engine\nfrom ingot.runtime.kv.blocks import Blocks\n",
    "runtime/engine.py": "from ingot.runtime.kv.blocks import Blocks\n\n\nclass Engine: ...\n",
    "runtime/kv/blocks.py": BLOCKS,
    "runtime/kv/tiers.py": "from ingot.passes.base import Pass\n\n\nclass Tiers: ...\n",
    "passes/base.py": "class Pass: ...\n",
}
PROOF = Proof("kv", ("tests/test_kv.py",))


def files_of(graph: ModuleGraph, proof: Proof = PROOF) -> set[str]:
    return {*Keys(graph).of(proof).files}


def test_a_key_has_what_the_tests_import_and_what_registries_name(tmp_path: Path) -> None:
    graph = repository(tmp_path, FILES)
    followed = {"tests/conftest.py", "tests/test_kv.py", "runtime/__init__.py", "runtime/kv/blocks.py"}
    named = {"runtime/kv/tiers.py", "passes/base.py"}
    assert files_of(graph) == followed | named


def test_neither_the_rest_of_a_package_nor_what_a_conftest_imports_belongs_to_a_key(tmp_path: Path) -> None:
    graph = repository(tmp_path, FILES)
    assert "runtime/engine.py" not in files_of(graph)
    proof = Proof("kv", PROOF.tests, ends=("runtime/kv/tiers.py",))
    assert files_of(graph) - files_of(graph, proof) == {"passes/base.py"}


def test_files_in_use_belong_to_a_key_data_by_folder(tmp_path: Path) -> None:
    repository(tmp_path, FILES)
    for name in ("data/one.json", "data/two.json", "kernel.c"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("1")
    proof = Proof("kv", PROOF.tests, uses=("data", "*.c"))
    graph = ModuleGraph(tmp_path)
    assert files_of(graph, proof) - files_of(graph) == {"data/*", "kernel.c"}
    key = Keys(graph).of(proof)
    (tmp_path / "data/two.json").write_text("2")
    changed = Keys(ModuleGraph(tmp_path)).of(proof)
    assert differences({"versions": key.versions}, key.files, changed) == ["data/*"]


def test_a_record_of_another_processor_is_stale_where_tests_depend_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, proof = repository(tmp_path, FILES), Proof("kv", PROOF.tests, processor=("avx",))
    monkeypatch.setattr(proofs, "CPU_INFO", tmp_path / "cpuinfo")
    found = []
    for flags in ("fpu avx avx2 ht", "fpu avx avx2 avx512f"):
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
        found.append(Keys(graph).of(proof))
    assert [key.versions["processor"] for key in found] == ["avx avx2", "avx avx2 avx512f"]
    assert found[0].digest != found[1].digest
    assert differences({"versions": found[0].versions}, found[0].files, found[1]) == [
        "processor avx avx2 -> avx avx2 avx512f"
    ]
    assert "processor" not in Keys(graph).of(PROOF).versions


@pytest.mark.parametrize(
    ("old", "new", "is_stale"),
    [
        ("SIZE = 16", "SIZE = 32", True),
        ("SIZE = 16", "SIZE = 16  # tokens", False),
        ('"""Blocks."""', '"""Blocks of tokens."""', False),
        ("\n\n    SIZE", "\n    SIZE", False),
    ],
)
def test_only_code_changes_a_key(tmp_path: Path, old: str, new: str, is_stale: bool) -> None:
    before = Keys(repository(tmp_path, FILES)).of(PROOF)
    file = tmp_path / "runtime/kv/blocks.py"
    file.write_text(file.read_text().replace(old, new))
    after = Keys(ModuleGraph(tmp_path)).of(PROOF)
    assert (before.digest != after.digest) is is_stale
    told = differences({"versions": before.versions}, before.files, after)
    assert told == (["runtime/kv/blocks.py, imported by tests/test_kv.py"] if is_stale else [])


def test_another_version_of_python_or_a_package_changes_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = repository(tmp_path, FILES)
    proof = Proof("kv", PROOF.tests, packages=("numpy",))
    before = Keys(graph).of(proof)
    record = {"versions": before.versions}
    monkeypatch.setattr(proofs, "_version", lambda name, proof: "9.0")
    monkeypatch.setattr(sys, "version_info", (3, 99, 0))
    after = Keys(graph).of(proof)
    assert after.digest != before.digest
    python, numpy = differences(record, before.files, after)
    assert python.endswith("-> 3.99")
    assert numpy.startswith("numpy ")
    assert numpy.endswith(" -> 9.0")


def test_files_and_packages_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    graph = repository(tmp_path, FILES)
    with pytest.raises(SystemExit, match=r"proof kv: .*names kernels/none: no such file"):
        Keys(graph).of(Proof("kv", PROOF.tests, uses=("kernels/none",)))
    with pytest.raises(SystemExit, match="proof kv needs not-a-package, which is not installed"):
        Keys(graph).of(Proof("kv", PROOF.tests, packages=("not-a-package",)))


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], int]:
    """commands(name) runs a command on a repository with one proof, whose tests pass without being run."""
    graph = repository(tmp_path, FILES)
    (tmp_path / "proofs.toml").write_text('[kv]\ntests = ["tests/test_kv.py"]\n')
    monkeypatch.setattr(proofs, "RECORDS", tmp_path / "proofs.json")
    monkeypatch.setattr(proofs, "read_table", lambda: read_table(tmp_path / "proofs.toml"))
    monkeypatch.setattr(proofs, "ModuleGraph", lambda: ModuleGraph(graph.root))
    result = {"outcomes": {"passed": 1}, "skipped": {}, "processor_seconds": 1.0}
    monkeypatch.setattr(proofs, "run", lambda proof: dict(result))
    return lambda name: main([name])


def test_a_proof_is_recorded_then_up_to_date_then_stale(
    commands: Callable[[str], int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert commands("check") == 1
    assert "proof kv is stale: it was never recorded" in capsys.readouterr().out
    assert commands("prove") == 0
    assert commands("check") == 0
    text = (tmp_path / "proofs.json").read_text()
    assert commands("prove") == 0
    assert (tmp_path / "proofs.json").read_text() == text
    (tmp_path / "runtime/kv/tiers.py").write_text("class Tiers: ...\n")
    capsys.readouterr()
    assert commands("check") == 1
    shown = capsys.readouterr().out
    assert "proof kv is stale: runtime/kv/tiers.py, imported by runtime/kv/blocks.py\n" in shown
    assert "run `make prove`, and commit .ci/proofs.json" in shown


def test_tests_that_fail_are_not_recorded(
    commands: Callable[[str], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(proofs, "run", lambda proof: None)
    assert commands("prove") == 1
    assert "not recorded, because tests failed: kv" in capsys.readouterr().out
    assert not (tmp_path / "proofs.json").exists()


def test_a_second_run_with_another_result_is_refused(
    commands: Callable[[str], int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert commands("prove") == 0
    assert commands("sample") == 0
    records = json.loads((tmp_path / "proofs.json").read_text())
    records["proofs"]["kv"]["outcomes"]["passed"] = 2
    (tmp_path / "proofs.json").write_text(json.dumps(records))
    assert commands("sample") == 1
    assert "Its key misses what changed" in capsys.readouterr().out


def test_a_commit_chooses_the_same_records_in_every_run() -> None:
    names = ["a", "b", "c", "d", "e"]
    assert sampled(names, "commit") == sampled(names[::-1], "commit")
    assert len({tuple(sampled(names, str(commit))) for commit in range(40)}) > 9
    assert sampled(["a"], "commit") == ["a"]


def test_tests_of_the_table_exist_and_belong_to_one_proof() -> None:
    tests = [test for proof in read_table().values() for test in proof.tests]
    for test in tests:
        file, _, function = test.partition("::")
        assert (ROOT / file).exists(), test
        assert not function or f"def {function}(" in (ROOT / file).read_text(encoding="utf-8"), test
        within = [one for one in tests if test != one and test.startswith((f"{one}/", f"{one}::"))]
        assert within == [], test


class Everyday:
    """Options of `pytest --everyday --only-left=FILE`, and a hook that takes the tests that are left out."""

    def __init__(self, only_left: Path | None = None) -> None:
        self.hook = self
        self.left_out: list[str] = []
        self._options = {"--everyday": True, "--only-left": only_left}

    def getoption(self, name: str) -> object:
        return self._options[name]

    def pytest_deselected(self, items: list[Any]) -> None:
        self.left_out += [item.nodeid for item in items]


class Item:
    """A collected test."""

    def __init__(self, nodeid: str) -> None:
        self.nodeid = nodeid

    def get_closest_marker(self, name: str) -> None:
        return None


def test_everyday_runs_collect_no_file_of_a_proof_and_none_of_its_tests() -> None:
    config: Any = Everyday()
    assert conftest.pytest_ignore_collect(ROOT / "tests/kernels", config)
    assert conftest.pytest_ignore_collect(ROOT / "tests/runtime", config) is None
    test = "tests/validation/verify/test_matrix.py::test_a_correct_engine_passes"
    items: list[Any] = [Item(f"{test}[side state]"), Item(f"{test}_too"), Item("tests/test_sizes.py::test_bytes")]
    conftest.pytest_collection_modifyitems(config, items)
    assert [item.nodeid for item in items] == [f"{test}_too", "tests/test_sizes.py::test_bytes"]
    assert config.left_out == [f"{test}[side state]"]


def test_a_run_of_what_is_left_collects_its_files_and_those_marked_oracle(tmp_path: Path) -> None:
    left = tmp_path / "left.txt"
    left.write_text("tests/runtime/cuda\ntests/test_sizes.py::test_bytes\n")
    config: Any = Everyday(left)
    collected = ("tests/runtime/cuda/test_plans.py", "tests/test_sizes.py", "tests/runtime", "tests/conftest.py")
    oracle = "tests/pipeline/checkpoint/formats/test_mxfp4.py"
    for file in (*collected, oracle):
        assert conftest.pytest_ignore_collect(ROOT / file, config) is None, file
    for file in ("tests/test_cores.py", "tests/kernels"):
        assert conftest.pytest_ignore_collect(ROOT / file, config), file
