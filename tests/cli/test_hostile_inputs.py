"""Every command, with every damaged input: one error, exit code 1 or 2, no traceback, nothing half written, no hang.

A part of the commands for each damage runs here, chosen by the damage's place in its table, so that each command meets
each kind. To run them all: INGOT_ALL_HOSTILE=1.
"""

import os
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from ingot.artifact import Artifact
from ingot.cli.main import run
from tests.cli.hostile_inputs import ARTIFACTS, AWQ, CHECKPOINTS, NATIVE_ARTIFACTS, Damage
from tests.conftest import BuildArtifact
from tests.each_case import each_case
from tests.parity import CHECKPOINTS as FIXTURES
from tests.pipeline.checkpoint.formats.tiny_model import exported

SECONDS = 60  # of one command that would otherwise wait for ever
UNMEASURED = ("--set", "evaluation=null", "--set", "latency=null", "--set", "gates={}")
TO_SAFETENSORS = ("--to", "safetensors")
Command = Callable[[str, str], list[str]]

OF_CHECKPOINTS: dict[str, Command] = {
    "lint": lambda source, out: ["lint-checkpoint", source],
    "build": lambda source, out: ["build", "fp32-cpu", "--set", f"checkpoint={source}", *UNMEASURED, "-o", out],
    "transcode": lambda source, out: ["transcode", source, *TO_SAFETENSORS, "-o", out],
    "import": lambda source, out: ["import", source, "-o", out],
    "export": lambda source, out: [
        "export",
        "fp32-cpu",
        "--to",
        "safetensors",
        "--set",
        f"checkpoint={source}",
        "-o",
        out,
    ],
    "gguf": lambda source, out: ["transcode", source, "--to", "gguf", "-o", out, "--json"],
}
OF_ARTIFACTS: dict[str, Command] = {
    "run": lambda source, out: ["run", source, "text"],
    "inspect": lambda source, out: ["inspect", source, "--program", "--files"],
    "validate": lambda source, out: ["validate", source],
    "export": lambda source, out: ["export", source, *TO_SAFETENSORS, "-o", out],
    "report": lambda source, out: ["quantize-report", source],
    "json": lambda source, out: ["inspect", source, "--json"],
}


def chosen(damages: Mapping[str, Damage], commands: Mapping[str, Command], share: int = 3) -> list[Any]:
    """Parameters (damage, command); transcode copies the weights of families that Ingot does not know."""
    every = bool(os.environ.get("INGOT_ALL_HOSTILE"))
    return [
        pytest.param(damage, command, id=f"{command}-{name}")
        for place, (name, damage) in enumerate(damages.items())
        for number, command in enumerate(commands)
        if (every or (place + number) % share == 0) and not (command == "transcode" and name.startswith("model_type"))
    ]


@pytest.fixture(autouse=True)
def _alarm() -> Iterator[None]:
    """A command that hangs fails."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise TimeoutError("the command hangs")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def assert_one_error(words: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path.name for path in folder.iterdir()}
    capsys.readouterr()
    code = run(words)
    out, err = capsys.readouterr()
    assert code in (1, 2), f"exit code {code}; {err[-500:]}"
    assert "Traceback" not in out + err
    assert {path.name for path in folder.iterdir()} == before, "something half written"
    if words[0] != "lint-checkpoint":  # its findings are its result
        assert err.count("error: ") == 1 or len(err.strip().splitlines()) <= 3, err
        assert len(err) < 3000
    assert (out + err).strip()


def assert_damage_is_one_error(
    whole: Path, damage: Damage, words: Command, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = folder / "source"
    shutil.copytree(whole, source)
    damage(source)
    assert_one_error(words(str(source), str(folder / "out")), folder, capsys)


@each_case(("damage", "command"), chosen(CHECKPOINTS, OF_CHECKPOINTS))
def test_a_damaged_checkpoint_is_one_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Damage, command: str
) -> None:
    assert_damage_is_one_error(FIXTURES / "llama", damage, OF_CHECKPOINTS[command], tmp_path, capsys)


@pytest.fixture(scope="module")
def awq(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model in AWQ, groups of 32."""
    return exported(tmp_path_factory.mktemp("awq"), "awq")


@each_case(("damage", "command"), chosen(AWQ, OF_CHECKPOINTS))
def test_a_damaged_quantized_checkpoint_is_one_error(
    awq: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Damage, command: str
) -> None:
    assert_damage_is_one_error(awq, damage, OF_CHECKPOINTS[command], tmp_path, capsys)


@pytest.fixture(scope="module")
def artifact(build_unmeasured: BuildArtifact) -> Artifact:
    return build_unmeasured("fp32-cpu", FIXTURES / "llama", "cpu.engine=onnxruntime")


@each_case(("damage", "command"), chosen(ARTIFACTS, OF_ARTIFACTS))
def test_a_damaged_artifact_is_one_error(
    artifact: Artifact, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Damage, command: str
) -> None:
    assert_damage_is_one_error(artifact.path, damage, OF_ARTIFACTS[command], tmp_path, capsys)


@pytest.fixture(scope="module")
def native(build_unmeasured: BuildArtifact) -> Artifact:
    return build_unmeasured("fp32-cpu", FIXTURES / "llama", "cpu.engine=native")


@each_case(("damage", "command"), chosen(NATIVE_ARTIFACTS, OF_ARTIFACTS))
def test_a_damaged_native_artifact_is_one_error(
    native: Artifact, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Damage, command: str
) -> None:
    assert_damage_is_one_error(native.path, damage, OF_ARTIFACTS[command], tmp_path, capsys)
