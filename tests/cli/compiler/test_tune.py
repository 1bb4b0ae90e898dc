"""`ingot tune` on the command line: what it says where it cannot measure, and its table where it can."""

import json
from functools import partial
from pathlib import Path

import pytest

from ingot.artifact import Artifact
from ingot.builder.tune.tune import Tuner
from ingot.cli.compiler import tune
from ingot.cli.main import run
from ingot.errors import EngineError
from tests.conftest import BuildArtifact
from tests.data_paths import FIXTURES
from tests.simulators.fake_gpu import FakeGpu, FakeStopwatch, compile_nothing, no_library

LLAMA = FIXTURES / "checkpoints" / "llama"
RECIPE = (
    "fp16-cuda",
    "--set",
    f"checkpoint={LLAMA}",
    "--set",
    "gpu.decode_rows=[1]",
    "--set",
    "gpu.prefill_rows=[16]",
    "--set",
    "engine.max_batch_tokens=16",
)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """Replaces the driver's device; compiles nothing."""
    made = FakeGpu(lambda kernel, grid: 1e-6 * int(kernel.constants["TILE"]))
    monkeypatch.setattr(tune, "open_device", lambda: made)
    monkeypatch.setattr(tune, "EventStopwatch", lambda: FakeStopwatch(made))
    monkeypatch.setattr(tune, "Tuner", partial(Tuner, compile_=compile_nothing, open_matmuls=no_library))
    return made


def test_a_table_is_written_and_reported(gpu: FakeGpu, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tiles.json"
    assert run(["tune", *RECIPE, "-o", str(file), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    table = json.loads(file.read_text())
    assert facts["device"] == table["device"] == "a GPU"
    assert {one["shape"] for one in facts["choices"]} == set(table["choices"])
    assert all(tile["columns"] == 32 for key, tile in table["choices"].items() if "rows=1 " in key)
    assert run(["tune", *RECIPE, "-o", str(file)]) == 0
    assert f"0 shapes measured, {len(table['choices'])} kept from before" in capsys.readouterr().err


def test_ctrl_c_says_what_is_kept(
    gpu: FakeGpu, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu, "capture", interrupt)
    assert run(["tune", *RECIPE, "-o", str(tmp_path / "tiles.json")]) == 130
    assert "run the same command to continue" in capsys.readouterr().err


def test_without_a_gpu_it_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise EngineError("no GPU can be used")

    monkeypatch.setattr(tune, "open_device", missing)
    assert run(["tune", *RECIPE, "-o", str(tmp_path / "tiles.json")]) == 1
    assert "no GPU can be used" in capsys.readouterr().err


def test_a_program_of_another_sm_or_of_the_cpu_is_refused(
    gpu: FakeGpu, tmp_path: Path, capsys: pytest.CaptureFixture[str], build_unmeasured: BuildArtifact
) -> None:
    output = ["-o", str(tmp_path / "tiles.json")]
    assert run(["tune", *RECIPE, "--set", "target=cuda-sm80", *output]) == 2
    assert "the program is for SM 80, and a GPU has SM 90" in capsys.readouterr().err
    artifact: Artifact = build_unmeasured("fp32-cpu", LLAMA)
    assert run(["tune", str(artifact.path), *output]) == 2
    assert "is for the target 'cpu'; only programs of the targets cuda-smXX" in capsys.readouterr().err
    assert run(["tune", str(artifact.path), "--set", "seed=1", *output]) == 2
    assert "--set is for recipes" in capsys.readouterr().err
