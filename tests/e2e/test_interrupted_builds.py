"""Disk full and kill -9 in the middle of a build: nothing half-written stays, and the next build succeeds."""

import errno
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ingot.artifact import open_artifact
from ingot.cli.main import run
from ingot.pipeline.checkpoint.safetensors_writer import SafetensorsWriter
from tests.conftest import UNMEASURED

SETTINGS = [part for setting in UNMEASURED for part in ("--set", setting)]


def build_in_child(output: Path, prelude: str) -> subprocess.Popen[bytes]:
    """Run a build in a process of its own, after some code that hurts it."""
    arguments = ["build", "demo", *SETTINGS, "-o", str(output)]
    code = f"{prelude}\nfrom ingot.cli.main import run\nraise SystemExit(run({arguments!r}))"
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)


PAUSE_BEFORE_SEAL = """
import sys, time
from ingot.artifact import ArtifactWriter
def wait(self):
    print("written", flush=True)
    time.sleep(600)
ArtifactWriter.seal = wait
"""


def test_kill_9_leaves_what_the_next_build_clears(tmp_path: Path) -> None:
    child = build_in_child(tmp_path / "demo", PAUSE_BEFORE_SEAL)
    assert child.stdout is not None
    assert child.stdout.readline() == b"written\n"
    child.send_signal(signal.SIGKILL)
    child.communicate()
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".ingot-build-demo-")
    assert run(["build", "demo", *SETTINGS, "-o", str(tmp_path / "demo")]) == 0
    assert [entry.name for entry in tmp_path.iterdir()] == ["demo"]
    open_artifact(tmp_path / "demo")


def test_a_file_that_cannot_grow_fails_the_build_by_name_and_leaves_nothing(tmp_path: Path) -> None:
    """The kernel stops the weights' file in its middle, as a full disk does."""
    limit = 1_000_000
    prelude = (
        f"import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {resource.RLIM_INFINITY}))"
    )
    child = build_in_child(tmp_path / "demo", prelude)
    _, shown = child.communicate(timeout=120)
    assert child.returncode == 1
    assert b"weights.safetensors" in shown
    assert b"Traceback" not in shown
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_fails_the_build_with_the_bytes_that_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(writer: object, content: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(SafetensorsWriter, "_write", full)
    assert run(["build", "demo", *SETTINGS, "-o", str(tmp_path / "demo")]) == 1
    assert re.search(r"No space left on device\): [\d,]{7,} bytes are needed", capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []


def test_two_builds_beside_each_other_both_succeed(tmp_path: Path) -> None:
    children = [build_in_child(tmp_path / "demo", "") for _ in range(2)]
    for child in children:
        _, shown = child.communicate(timeout=300)
        assert child.returncode == 0, shown.decode()
    assert [entry.name for entry in tmp_path.iterdir()] == ["demo"]
    open_artifact(tmp_path / "demo")
