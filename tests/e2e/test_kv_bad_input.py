"""Options of the KV tiers that cannot work, and disks that fail while an engine serves, as a user meets them.

Each is one error that says what to change, or a warning that is logged once; no token changes.
"""

import logging
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from ingot.artifact import Artifact
from ingot.cli.main import run
from ingot.errors import EngineError, UsageError
from ingot.runtime import Completion, Engine, SamplingParams
from ingot.runtime.kv.disk import threads
from tests.cli.refusals import assert_refused
from tests.conftest import BuildArtifact
from tests.each_case import each_case
from tests.runtime.kv.disk.test_folder import mounted
from tests.simulators.hanging_files import hanging_files

DISK_BYTES = 1 << 24
PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)
PROMPTS = [[3 + number for number in range(start, start + 60)] for start in (0, 60, 120)]


@pytest.fixture(scope="module")
def artifact(build_unmeasured: BuildArtifact, two_layers: Path) -> Artifact:
    return build_unmeasured("fp32-cpu", two_layers)


@pytest.fixture(scope="module")
def expected(artifact: Artifact) -> list[tuple[int, ...]]:
    with Engine.load(artifact, prefix_cache=False) as engine:
        return tokens(engine.generate(PROMPTS, PARAMS))


def tokens(completions: list[Completion]) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in completions]


def foreign(folder: Path) -> Path:
    (folder / "thesis.doc").write_text("mine")
    return folder


def of_another_version(folder: Path) -> Path:
    (folder / "ingot-kv.json").write_text('{"format": "ingot-kv", "version": 9}')
    return folder


def open_to_all(folder: Path) -> Path:
    folder.chmod(0o777)
    return folder


def file_in(folder: Path) -> Path:
    (folder / "kv").write_text("")
    return folder / "kv"


@each_case(
    ("make", "message"),
    [
        (foreign, r"holds other files \('thesis.doc'\) and no ingot-kv.json; a KV folder must be new, empty, or one"),
        (of_another_version, "has format version 9; this Ingot reads and writes version 2; choose another folder"),
        (open_to_all, r"every user of the machine may write to .* run chmod 700 on it, or choose another"),
        (file_in, "it, or a folder above it, is not a folder; choose another path"),
        (lambda folder: file_in(folder) / "kv", "it, or a folder above it, is not a folder; choose another path"),
        (lambda _: Path("/sys/kernel/ingot"), "cannot keep KV blocks in /sys/kernel/ingot: .*choose another folder"),
        (lambda _: Path("/proc/ingot"), "cannot keep KV blocks in /proc/ingot: .*choose another folder"),
        (lambda folder: folder / ("x" * 300), "the path is too long; choose another one"),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused_with_what_to_do(
    artifact: Artifact, tmp_path: Path, make: Callable[[Path], Path], message: str
) -> None:
    path = make(tmp_path)
    with pytest.raises(UsageError, match=message):
        Engine.load(artifact, kv_disk_path=path, kv_disk_bytes=DISK_BYTES)


@each_case(
    ("options", "error", "message"),
    [
        ({"kv_host_bytes": 10}, UsageError, "kv_host_bytes is 10; one block takes .*: give more, or 0 for none"),
        ({"kv_host_bytes": 1 << 50}, EngineError, "this machine has .*; give kv_host_bytes less, or keep blocks on"),
        ({"kv_blocks": 0}, UsageError, "kv_blocks is 0; the pool needs at least 1 block of 16 tokens"),
        ({"kv_bytes": 0}, UsageError, "kv_bytes is 0; it must be a number of bytes from 1 to 1125899906842624"),
        ({"kv_blocks": 1 << 40}, EngineError, r"and this machine has .*; ask for fewer blocks \(kv_blocks or kv_bytes"),
        ({"kv_disk_bytes": 100}, UsageError, "a KV folder of 100 B cannot hold one block of .*; raise kv_disk_bytes"),
    ],
)
def test_sizes_that_cannot_work_are_refused_by_name(
    artifact: Artifact, tmp_path: Path, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    folder: dict[str, Any] = {"kv_disk_path": tmp_path} if "kv_disk_bytes" in options else {}
    with pytest.raises(error, match=message):
        Engine.load(artifact, **options, **folder)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["kv_disk_path=FOREIGN", "kv_disk_bytes=16MiB"], "holds other files ('thesis.doc')"),
        (["kv_disk_bytes=2000TB"], "--set kv_disk_bytes"),
        (["kv_disk_path=/tmp/kv"], "give both or neither"),
        (["kv_host_bytes=1"], "kv_host_bytes is 1; one block takes"),
        (["kv_bytes=0"], "kv_bytes is 0; it must be a number of bytes from 1 to 1125899906842624"),
    ],
)
def test_the_command_line_says_the_same_in_one_line(
    artifact: Artifact, tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: list[str], message: str
) -> None:
    given = [setting.replace("FOREIGN", str(foreign(tmp_path))) for setting in settings]
    arguments = [part for setting in given for part in ("--set", setting)]
    code = run(["run", str(artifact.path), "def f", *arguments])
    *notes, error = capsys.readouterr().err.splitlines()
    assert not [note for note in notes if not note.startswith("NOT MEASURED")]
    assert_refused(code, error, message, expected_code=code)
    assert code in (1, 2)


@contextmanager
def full(path: Path) -> Iterator[Callable[[], object]]:
    """A disk with room for a few blocks."""
    with mounted(path, "size=200k,mode=0700"):
        yield lambda: None


@contextmanager
def read_only(path: Path) -> Iterator[Callable[[], object]]:
    with mounted(path, "size=16m,mode=0700"):
        yield lambda: subprocess.run(["mount", "-o", "remount,ro", path], check=False)


@contextmanager
def vanishing(path: Path) -> Iterator[Callable[[], object]]:
    yield lambda: shutil.rmtree(path)


@contextmanager
def limited(path: Path) -> Iterator[Callable[[], object]]:
    """Files of this process may be no larger than a page."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        yield lambda: None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    ("trouble", "warning"),
    [
        (full, "is on a full disk: blocks are stored in the place of others until there is space"),
        (vanishing, "is not used any more: .* the folder was deleted"),
        (limited, "is on a full disk: blocks are stored in the place of others until there is space"),
        (read_only, ""),  # a file system with files open for writing stays writable
    ],
    ids=["full", "vanishing", "limited", "read-only"],
)
def test_a_disk_that_fails_while_an_engine_serves_changes_no_token(
    artifact: Artifact,
    expected: list[tuple[int, ...]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    trouble: Callable[[Path], Any],
    warning: str,
) -> None:
    caplog.set_level(logging.WARNING)
    path = tmp_path / "disk"
    with ExitStack() as disk:
        begin = disk.enter_context(trouble(path))
        folder = path / "kv" if path.exists() else path
        with Engine.load(artifact, kv_disk_path=folder, kv_disk_bytes=DISK_BYTES, kv_restore="always") as engine:
            assert engine.generate(PROMPTS[0], PARAMS).token_ids == expected[0]
            begin()
            for _ in range(2):
                assert tokens(engine.generate(PROMPTS, PARAMS)) == expected
                engine.flush_kv()
            engine.check()
        with suppress_refusal(), Engine.load(artifact, kv_disk_path=folder, kv_disk_bytes=DISK_BYTES) as engine:
            assert tokens(engine.generate(PROMPTS, PARAMS)) == expected
    if warning:
        first = warning.partition(":")[0]
        found = [record.getMessage() for record in caplog.records if first in record.getMessage()]
        assert 1 <= len(found) <= 2, "once for each engine"


@contextmanager
def suppress_refusal() -> Iterator[None]:
    """The next engine may refuse the folder, as it does where the file system is read-only."""
    try:
        yield
    except UsageError as error:
        if "choose another" not in str(error):
            raise


def test_a_file_system_that_hangs_holds_up_nothing(
    artifact: Artifact,
    expected: list[tuple[int, ...]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests whose blocks are being read are computed, no thread of the engine waits, and closing ends."""
    monkeypatch.setattr(threads, "HANG_SECONDS", 0.2)
    options: dict[str, Any] = {"kv_disk_path": tmp_path, "kv_disk_bytes": DISK_BYTES, "kv_restore": "always"}
    with Engine.load(artifact, **options) as engine:
        engine.generate(PROMPTS, PARAMS)
    with hanging_files() as files:
        engine = Engine.load(artifact, **options)
        caplog.set_level(logging.WARNING)
        files.hang()
        assert tokens(engine.generate(PROMPTS, PARAMS)) == expected
        assert files.is_awaited.is_set()
        engine.generate(list(range(3, 63, 2)), PARAMS)
        assert not engine.flush_kv()
        engine.check()
        engine.close()
        assert not files.misused, "the engine's thread called the file system"
    assert caplog.text.count("has not answered for 0.2 seconds") == 1


def test_blocks_on_disk_are_restored_again_when_a_file_system_answers_again(
    artifact: Artifact, expected: list[tuple[int, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "HANG_SECONDS", 0.2)
    options: dict[str, Any] = {"kv_disk_path": tmp_path, "kv_disk_bytes": DISK_BYTES, "kv_restore": "always"}
    with Engine.load(artifact, **options) as engine:
        engine.generate(PROMPTS, PARAMS)
    with hanging_files() as files, Engine.load(artifact, **options) as engine:
        files.hang()
        assert engine.generate(PROMPTS[0], PARAMS).token_ids == expected[0]
        files.release()
        tiers = engine.tiers
        assert tiers
        while any(pool.disk_refusal for pool in tiers._pools):
            tiers.poll()
        last = engine.generate(PROMPTS[2], PARAMS)
        assert last.token_ids == expected[2]
        assert last.cached_tokens_by_tier[2] == 48
        engine.check()
