"""kill -9 during calibration: the next build resumes there and produces the same artifact."""

import json
import os
import signal
import subprocess
import sys
import time
from hashlib import sha256
from pathlib import Path

import pytest

from ingot.artifact import CALIBRATION_FILE, open_artifact
from ingot.cli.main import run
from ingot.runtime import Tokenizer
from tests.conftest import UNMEASURED

STAGES = 9  # per pass (awq, gptq): four in each of two layers, and the head
DATA = ["calibration.text=checkpoint:heldout.txt", "calibration.sequences=8", "calibration.sequence_tokens=64"]
PASSES = ["passes.awq.rounding=nearest", "passes.awq.steps=1", "passes.gptq.refine=0"]
KILLS = (4, STAGES + 4)  # records on disk when a build is killed: during awq, during gptq


def arguments(checkpoint: Path, output: Path) -> list[str]:
    """A build with two calibrated passes."""
    settings = [f"checkpoint={checkpoint}", "generate=null", *UNMEASURED, *DATA, *PASSES]
    return ["build", "int4-awq-gptq-cpu", "-o", str(output), *(part for each in settings for part in ("--set", each))]


def build_and_kill(checkpoint: Path, output: Path, cache: Path, records: int) -> None:
    """Build in a child process; kill it as soon as this many records are on disk."""
    environment = {**os.environ, "INGOT_CACHE": str(cache)}
    child = subprocess.Popen([sys.executable, "-m", "ingot", *arguments(checkpoint, output)], env=environment)
    while len(list(cache.glob("calibration/*/*.safetensors"))) < records:
        assert child.poll() is None, "the build ended before it could be killed"
        time.sleep(0.002)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL


def test_a_build_killed_twice_produces_the_same_artifact(
    two_layers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments(two_layers, tmp_path / "whole")) == 0
    cache = tmp_path / "cache"
    for moment in KILLS:
        build_and_kill(two_layers, tmp_path / "killed", cache, moment)
    capsys.readouterr()
    monkeypatch.setenv("INGOT_CACHE", str(cache))
    assert run(arguments(two_layers, tmp_path / "killed")) == 0
    shown = capsys.readouterr().err
    assert "awq: all 9 stages were done already" in shown
    assert "gptq: resumed at stage" in shown
    whole, killed = (open_artifact(tmp_path / name).manifest.identity for name in ("whole", "killed"))
    assert whole == killed
    data = json.loads((tmp_path / "killed" / CALIBRATION_FILE).read_text())
    assert (data["text"], data["tokens"], data["packing"], data["kind"]) == ("heldout.txt", 512, "packed", "text")
    assert data["sha256"] == sha256((two_layers / "heldout.txt").read_bytes()).hexdigest()
    assert run(["inspect", str(tmp_path / "killed")]) == 0
    tokens = len(Tokenizer.load(two_layers).encode((two_layers / "heldout.txt").read_text(), add_special_tokens=False))
    assert f"on 512 of {tokens:,} tokens of heldout.txt (SHA-256" in capsys.readouterr().out
    assert not list(cache.glob("calibration/*")), "a successful build removes its records"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["cache", "killed", "whole"]


def test_no_resume_starts_over(
    two_layers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    build_and_kill(two_layers, tmp_path / "killed", tmp_path / "cache", 2)
    monkeypatch.setenv("INGOT_CACHE", str(tmp_path / "cache"))
    assert run([*arguments(two_layers, tmp_path / "killed"), "--no-resume"]) == 0
    assert "resumed" not in capsys.readouterr().err


def test_one_thread_and_two_calibrate_to_the_same_bits(two_layers: Path, tmp_path: Path) -> None:
    identities = set()
    for threads in ("1", "2"):
        names = ("INGOT_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
        environment = {**os.environ, "INGOT_CACHE": str(tmp_path / "cache"), **dict.fromkeys(names, threads)}
        output = tmp_path / threads
        subprocess.run([sys.executable, "-m", "ingot", *arguments(two_layers, output)], env=environment, check=True)
        identities.add(open_artifact(output).manifest.identity)
    assert len(identities) == 1
