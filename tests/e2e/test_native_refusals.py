"""What the native engine cannot load is one error, by `ingot run` and by Engine.load; what slows it is a warning."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ingot.artifact import Artifact
from ingot.artifact.programs.cpu_program import OPERATIONS_FILE, WEIGHTS_FILE
from ingot.cli.main import run
from ingot.errors import IngotError
from ingot.runtime import Engine
from ingot.runtime.cpu.native import program as native_program
from ingot.runtime.cpu.native.library import LIBRARY, load_library, native_library
from tests.artifact.tiny_artifact import reseal
from tests.cli.refusals import assert_refused
from tests.conftest import BuildArtifact
from tests.data_paths import ROOT

pytestmark = pytest.mark.skipif(native_library() is None, reason="the library was not built")

Captured = pytest.CaptureFixture[str]
Change = Callable[[Path], None]


@pytest.fixture
def artifact(build_unmeasured: BuildArtifact, two_layers: Path, tmp_path: Path) -> Path:
    """A copy of an artifact of the native engine."""
    built = build_unmeasured("int4-cpu", two_layers, "cpu.engine=native")
    return Path(shutil.copytree(built.path, tmp_path / "copy"))


def refusals(artifact: Path, capsys: Captured, *options: str, **loaded: Any) -> tuple[int, str, str]:
    """Exit code and message of `ingot run`, and the message of Engine.load."""
    capsys.readouterr()
    code = run(["run", str(artifact), "def f", "--max-tokens", "1", *options])
    shown = capsys.readouterr().err
    error = shown[shown.rindex("error: ") :] if "error: " in shown else shown  # after a note that nothing was measured
    with pytest.raises(IngotError) as refused:
        Engine.load(artifact, **loaded)
    return code, error, str(refused.value)


def truncate(folder: Path) -> None:
    file = folder / WEIGHTS_FILE
    file.write_bytes(file.read_bytes()[:-1000])


def flip_a_byte(folder: Path) -> None:
    file = folder / WEIGHTS_FILE
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)


def drop_weights(folder: Path) -> None:
    (folder / WEIGHTS_FILE).unlink()


def cut_operations(folder: Path) -> None:
    file = folder / OPERATIONS_FILE
    file.write_bytes(file.read_bytes()[:-1])


DAMAGED: dict[str, tuple[Change, str]] = {
    "a truncated pack": (truncate, "weights.safetensors: has "),
    "a changed byte of the pack": (flip_a_byte, "weights.safetensors: its SHA-256 is not the manifest's"),
    "no pack": (drop_weights, "weights.safetensors"),
    "a truncated program": (cut_operations, "operations.json: has "),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_files_that_are_not_those_of_the_build_are_named(artifact: Path, capsys: Captured, case: str) -> None:
    change, wanted = DAMAGED[case]
    change(artifact)
    code, shown, error = refusals(artifact, capsys)
    assert_refused(code, shown, wanted)
    assert wanted in error


def edit_operations(edit: Callable[[str], str]) -> Change:
    def change(folder: Path) -> None:
        file = folder / OPERATIONS_FILE
        file.write_text(edit(file.read_text()))

    return change


def pack_again(edit: Callable[[dict[str, np.ndarray]], object]) -> Change:
    def change(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS_FILE)
        edit(tensors)
        save_file(tensors, folder / WEIGHTS_FILE)

    return change


def first_operation(**facts: object) -> Callable[[str], str]:
    def edit(text: str) -> str:
        raw = json.loads(text)
        raw["operations"][0] |= facts
        return json.dumps(raw)

    return edit


AGAIN = "build the artifact again"
SEALED: dict[str, tuple[Change, str]] = {  # by another program than Ingot: its digests are right
    "not JSON": (edit_operations(lambda text: text[:-1]), "operations.json: "),
    "an unknown operation": (edit_operations(first_operation(kind="embeds")), "embeds"),
    "an unknown form": (edit_operations(lambda text: text.replace('"int4"', '"int5"', 1)), "int5"),
    "a buffer that does not exist": (edit_operations(first_operation(output={"buffer": "x9"})), "has no buffer 'x9'"),
    "a tile less": (
        pack_again(lambda tensors: tensors.update({next(iter(tensors)): np.zeros((1, 64), np.uint8)})),
        "needs",
    ),
    "a tensor less": (pack_again(lambda tensors: tensors.pop(next(iter(tensors)))), "holds no tensor"),
}


@pytest.mark.parametrize("case", SEALED)
def test_programs_that_ingot_would_not_write_are_refused(artifact: Path, capsys: Captured, case: str) -> None:
    change, wanted = SEALED[case]
    change(artifact)
    reseal(artifact, lambda raw: None)
    code, shown, error = refusals(artifact, capsys)
    assert_refused(code, shown, wanted)
    assert wanted in error
    assert error.endswith(AGAIN)


def test_more_threads_than_cores_are_refused(artifact: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INGOT_THREADS", "200")
    code, shown, error = refusals(artifact, capsys)
    assert_refused(code, shown, "INGOT_THREADS is 200; it must be from 1 to ", expected_code=2)
    assert "the cores this process may run on" in error


def test_cores_that_the_process_may_not_run_on_are_refused(artifact: Path, capsys: Captured) -> None:
    wanted = "cpu_affinity is 8000; this process may not run on 8000: choose from "
    code, shown, error = refusals(artifact, capsys, "--set", "cpu_affinity=8000", cpu_affinity="8000")
    assert_refused(code, shown, wanted)
    assert wanted in error


def test_a_library_that_is_missing_or_does_not_load_is_named(
    artifact: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(native_program, "native_library", lambda: None)
    wanted = "the library of the native CPU engine was not built: install Ingot again where there is a C compiler"
    code, shown, error = refusals(artifact, capsys)
    assert_refused(code, shown, wanted)
    assert wanted in error
    (tmp_path / LIBRARY).write_bytes(b"\x7fELF of another machine")
    monkeypatch.setattr(native_program, "native_library", lambda: load_library(tmp_path / LIBRARY))
    wanted = f"{LIBRARY}: does not load "
    code, shown, error = refusals(artifact, capsys)
    assert_refused(code, shown, wanted)
    assert "install Ingot again on this machine" in error


LIMITED = """
import logging, resource, sys
from ingot.artifact import open_artifact
from ingot.errors import EngineError
from ingot.runtime.cpu import native_executor
from ingot.runtime.cpu.native_executor import NativeExecutor
from ingot.runtime.executors import load_executor
from ingot.runtime.options import EngineOptions
from pathlib import Path

MiB = 1 << 20
logging.basicConfig(format="warning: %(message)s")
artifact = open_artifact(sys.argv[1])

def limit(mebibytes):
    "So much more address space than is in use now; None: as before."
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (hard if mebibytes is None else used + mebibytes * MiB, hard))

def load(mebibytes, **options):
    limit(mebibytes)
    try:
        load_executor(artifact, EngineOptions(**{"kv_blocks": 8, "num_threads": 1} | options)).close()
        print("loaded")
    except EngineError as error:
        print(error)
    finally:
        limit(None)

load(None)  # what is imported on use is there now
load(32)
load(96, kv_bytes=256 * MiB, kv_blocks=None)
load(96, max_batch_tokens=1 << 18)
load(256)
native_executor.available_cores = lambda: 200
load(512, num_threads=200)
load(512, num_threads=200)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of address space are Linux's")
def test_memory_that_the_system_refuses_is_named_and_threads_that_it_refuses_are_done_without(artifact: Path) -> None:
    pack_again(lambda tensors: tensors.update({"unused": np.zeros(64 << 20, np.uint8)}))(artifact)
    reseal(artifact, lambda raw: None)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OPENBLAS_NUM_THREADS": "1"}
    large_stacks = 'ulimit -s 65536; exec "$0" "$@"'  # a few threads fit into what is left, and the next does not
    command = ["sh", "-c", large_stacks, sys.executable, "-c", LIMITED, str(artifact)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    plain, weights, pool, arena, enough, *threads = done.stdout.splitlines()
    assert (plain, enough, threads) == ("loaded", "loaded", ["loaded", "loaded"])
    assert (
        "weights.safetensors: cannot be mapped into memory: Cannot allocate memory; free some address space" in weights
    )
    assert "a KV pool of " in pool
    assert "the operating system refused it" in pool
    assert "the arena of a step's operations needs " in arena
    assert "set a smaller max_batch_tokens" in arena
    (warning,) = done.stderr.splitlines()
    assert warning.startswith("warning: the system started ")
    assert " of 200 threads, so steps take longer" in warning


def test_other_engines_refuse_cores(build_unmeasured: BuildArtifact, two_layers: Path) -> None:
    built: Artifact = build_unmeasured("fp32-cpu", two_layers, "cpu.engine=onnxruntime")
    with pytest.raises(
        IngotError, match=r"cpu_affinity pins the threads of the native CPU engine, .* run by onnxruntime"
    ):
        Engine.load(built, cpu_affinity="0")
