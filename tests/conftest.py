"""Fixtures that several areas share: artifacts built once per run, caches kept out of the user's folders.

Under pytest-xdist every worker is a process; they share what is built, and divide the cores among them.
"""

import fcntl
import gc
import json
import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from ingot.artifact import Artifact, open_artifact
from ingot.builder import build
from ingot.progress import DETAILS, NOTES
from ingot.runtime.cpu import native
from ingot.settings import num_threads
from ingot.validation import evidence
from ingot.validation.memory import MemoryProbe, measure_memory
from ingot.validation.memory_probe import process_memory
from ingot.validation.options import MemoryOptions
from tests import each_case
from tests.data_paths import DEMO_MODEL, ROOT
from tests.hybrid_model import imports_hybrids
from tests.simulators import failing_calls

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a job of a shell in the background, whose children inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ["TRITON_INTERPRET"] = "1"  # before any test imports a kernel; see simulators/triton_interpreter.py

NATIVE = ROOT / "runtime" / "cpu" / "native"
_SKIPPED_CASES = "skipped cases"
UNMEASURED = ("evaluation=null", "latency=null", "gates={}")
THREADS = ("INGOT_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")

BuildArtifact = Callable[..., Artifact]

settings.register_profile("ingot", deadline=None)  # no test says how long anything takes
settings.load_profile("ingot")


def pytest_addoption(parser: pytest.Parser) -> None:
    """How many random problems of each kernel tests/kernels draws, and which cases of `each_case` run."""
    parser.addoption("--kernel-cases", type=int, default=20, help="random problems of each kernel (default: 20)")
    parser.addoption("--every-call", action="store_true", help="fail every call of the system, not a sample of them")
    parser.addoption(
        "--case", action="append", default=[], help="of tests with each_case, run cases that have this text"
    )
    parser.addoption(
        "--left-to", type=Path, help="write the ids of tests that are skipped, or skip a case, to this file"
    )
    parser.addoption("--only-left", type=Path, help="run the tests of such a file, and those marked oracle, alone")
    parser.addoption("--everyday", action="store_true", help="leave out the proofs of .ci/proofs.toml")


def pytest_configure(config: pytest.Config) -> None:
    """Choose the cases."""
    each_case.ONLY[:] = config.getoption("--case")
    failing_calls.EVERY_CALL[:] = [True] * config.getoption("--every-call")
    if left_to := config.getoption("--left-to"):
        config.pluginmanager.register(_LeftTests(left_to))


class _LeftTests:
    """Writes what a run has left for one in an environment with more packages.

    Of modules that are skipped for the same reason, pytest-xdist reports only the first: each worker writes its own.
    """

    def __init__(self, file: Path) -> None:
        worker = os.environ.get("PYTEST_XDIST_WORKER")
        self._parts = file.parent / f"{file.name}-parts"
        self._file = self._parts / worker if worker else file
        self._is_worker = bool(worker)
        self._ids: set[str] = set()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self._ids.add(report.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped or (_SKIPPED_CASES, True) in report.user_properties:
            self._ids.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        if not self._is_worker and self._parts.exists():
            for part in self._parts.iterdir():
                self._ids.update(part.read_text(encoding="utf-8").splitlines())
            shutil.rmtree(self._parts)
        self._file.write_text("".join(f"{each}\n" for each in sorted(self._ids)), encoding="utf-8")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: "pytest.CallInfo[None]") -> Iterator[None]:
    """Note in the report of a test with each_case whether some of its cases were skipped."""
    report: pytest.TestReport = yield  # type: ignore[assignment]  # what the hook returns
    if call.when == "call" and any(each_case.HAS_SKIPPED):
        report.user_properties.append((_SKIPPED_CASES, True))
    each_case.HAS_SKIPPED.clear()
    return report  # type: ignore[return-value]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say which tests did not run."""
    if config.getoption("--everyday"):
        names = ", ".join(_proofs())
        terminalreporter.write_line(f"left out, because .ci/proofs.json has their results: {names}")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import files without a test to run, which takes seconds in every worker."""
    if config.getoption("--everyday") and any(collection_path == ROOT / test for test in _proven()):
        return True
    left = _left(config.getoption("--only-left"))
    if left is None or not collection_path.match("test_*.py"):
        return None
    file = collection_path.relative_to(ROOT)
    files = {test.partition("::")[0] for test in left}
    is_left = not files.isdisjoint(map(str, (file, *file.parents)))
    return None if is_left or "pytest.mark.oracle" in collection_path.read_text(encoding="utf-8") else True


@cache
def _left(file: Path | None) -> frozenset[str] | None:
    """The tests, files and folders that another run has left; None for all."""
    return None if file is None else frozenset(file.read_text(encoding="utf-8").splitlines())


@cache
def _proofs() -> dict[str, tuple[str, ...]]:
    """Files, folders and tests whose results are recorded, by the name of the proof."""
    from proofs import read_table  # pytest finds .ci, programs that import this file do not

    return {name: proof.tests for name, proof in read_table().items()}


@cache
def _proven() -> frozenset[str]:
    return frozenset(test for tests in _proofs().values() for test in tests)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With --everyday, leave out proofs; with --only-left, keep the tests that another run has left."""
    left = _left(config.getoption("--only-left"))
    proven = _proven() if config.getoption("--everyday") else frozenset()
    kept: list[pytest.Item] = []
    others: list[pytest.Item] = []
    for item in items:
        file_of_item = item.nodeid.partition("::")[0]
        places = (item.nodeid, file_of_item, *map(str, Path(file_of_item).parents))
        is_left = left is None or not left.isdisjoint(places) or item.get_closest_marker("oracle")
        is_proven = item.nodeid.partition("[")[0] in proven
        (kept if is_left and not is_proven else others).append(item)
    config.hook.pytest_deselected(items=others)
    items[:] = kept


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs: list[object]) -> None:
    """Workers, which are about to start, divide the cores; threads beyond the cores would only wait for each other."""
    share = str(max(1, num_threads() // len(specs)))
    for name in THREADS:
        os.environ.setdefault(name, share)


def pytest_sessionstart() -> None:
    """In a source tree, compile the library again if its sources changed: tests must not run an older one."""
    # benchmarks/cpu/sanitize.py runs tests with a library in another place; it preloads what would slow the compiler.
    is_in_use = Path(native.__file__).resolve().parent == NATIVE
    is_compiled = any(NATIVE.glob("*.so")) and find_spec("hatchling") is not None
    if "PYTEST_XDIST_WORKER" in os.environ or not is_in_use or not is_compiled:
        return
    from hatch_build import LIBRARY, compile_library, replace_library, source_digest

    library = NATIVE / LIBRARY
    if not library.exists() or source_digest(NATIVE).encode() not in library.read_bytes():
        with tempfile.TemporaryDirectory() as folder:
            built = Path(folder, library.name)
            problem = compile_library(NATIVE, built)
            assert problem is None, problem
            replace_library(library, built)


def pytest_collection_finish() -> None:
    """What stands until the run ends need not be looked at whenever garbage is collected."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def folder_of_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all workers of a run."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session", autouse=True)
def _caches_of_this_run(tmp_path_factory: pytest.TempPathFactory, folder_of_run: Path) -> Iterator[None]:
    """Baselines of tests are made in a folder of this worker; kernels are compiled once for all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INGOT_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("TRITON_CACHE_DIR", str(folder_of_run / "triton"))
        yield


@pytest.fixture(autouse=True)
def _levels_of_notes() -> Iterator[None]:
    """The command line shows notes from its first use on; the tests after one of it see only warnings, as others do."""
    yield
    for name in (NOTES, DETAILS):
        logging.getLogger(name).setLevel(logging.NOTSET)


@pytest.fixture(scope="session")
def two_layers(folder_of_run: Path) -> Path:
    """The demo model's first two layers of six, and some of its text: for tests that build or calibrate often."""
    return _first_layers(folder_of_run / "two-layers" / DEMO_MODEL.name, 2)


@pytest.fixture(scope="session")
def one_layer(folder_of_run: Path) -> Path:
    """The demo model's first layer: for tests that interpret kernels."""
    return _first_layers(folder_of_run / "one-layer" / DEMO_MODEL.name, 1)


def _first_layers(folder: Path, count: int) -> Path:
    """The demo model's first layers in a folder, made once a run."""
    folder.parent.mkdir(exist_ok=True)
    with locked(folder.with_suffix(".lock")):
        if not folder.exists():
            shutil.copytree(DEMO_MODEL, folder, ignore=shutil.ignore_patterns("model.safetensors"))
            config = json.loads((DEMO_MODEL / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": count}))
            text = (DEMO_MODEL / "heldout.txt").read_text(encoding="utf-8")
            (folder / "heldout.txt").write_text(text[:40_000], encoding="utf-8")
            tensors = load_file(DEMO_MODEL / "model.safetensors")
            layers = [*map(str, range(count))]
            kept = [name for name in tensors if ".layers." not in name or name.split(".")[2] in layers]
            save_file({name: tensors[name] for name in kept}, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="session")
def upcycled(two_layers: Path) -> Path:
    """The two layers as a mixtral: its four experts are the feed-forward with noise, its routers are random."""
    folder = two_layers.parent / "upcycled"
    with locked(folder.with_suffix(".lock")):
        if not folder.exists():
            shutil.copytree(two_layers, folder, ignore=shutil.ignore_patterns("model.safetensors"))
            config = json.loads((two_layers / "config.json").read_text())
            mixture = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
            (folder / "config.json").write_text(json.dumps({**config, **mixture}))
            save_file(_upcycled(load_file(two_layers / "model.safetensors")), folder / "model.safetensors")
    return folder


def _upcycled(tensors: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    rng, made = np.random.default_rng(0), {}
    for name, array in tensors.items():
        layer, _, part = name.partition(".mlp.")
        if not part:
            made[name] = array
            continue
        own = {"gate_proj.weight": "w1", "up_proj.weight": "w3", "down_proj.weight": "w2"}[part]
        noise = 0.02 * array.astype(np.float32).std()
        for expert in range(4):
            changed = array + noise * rng.standard_normal(array.shape, dtype=np.float32)
            made[f"{layer}.block_sparse_moe.experts.{expert}.{own}.weight"] = changed.astype(array.dtype)
        if own == "w1":
            made[f"{layer}.block_sparse_moe.gate.weight"] = rng.standard_normal((4, array.shape[1])).astype(array.dtype)
    return made


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Wait until no other worker is between here and the end."""
    with file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def build_unmeasured(folder_of_run: Path) -> BuildArtifact:
    """build_unmeasured(recipe, checkpoint, *overrides) -> Artifact, made once a run for equal arguments."""

    def make(recipe: str, checkpoint: Path = DEMO_MODEL, *overrides: str) -> Artifact:
        key = sha256("\0".join((recipe, str(checkpoint), *overrides)).encode()).hexdigest()[:32]
        folder = folder_of_run / key / recipe
        folder.parent.mkdir(exist_ok=True)
        with locked(folder.with_suffix(".lock")):
            if not folder.exists():
                build(recipe, [f"checkpoint={checkpoint}", *UNMEASURED, *overrides], folder)
        return open_artifact(folder, verify=False)

    return make


@pytest.fixture(scope="session")
def build_hybrid(folder_of_run: Path, build_unmeasured: BuildArtifact) -> Callable[..., Artifact]:
    """build_hybrid(recipe, *overrides) -> Artifact of tests/hybrid_model.py, made once a run for equal arguments."""
    three_layers = _first_layers(folder_of_run / "three-layers" / DEMO_MODEL.name, 3)

    def make(recipe: str, *overrides: str) -> Artifact:
        with imports_hybrids():
            return build_unmeasured(recipe, three_layers, *overrides)

    return make


def _probe_this_process(artifact: Path, options: MemoryOptions) -> MemoryProbe:
    now = process_memory()
    return MemoryProbe(now, now, now)


@pytest.fixture(scope="module")
def memory_of_this_process() -> Iterator[None]:
    """For tests of what is done with measurements: no fresh processes are started to take their memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evidence, "measure_memory", partial(measure_memory, prober=_probe_this_process))
        yield
