"""A build's prediction: sizes to the byte, latencies of the load in virtual time, and no build that fails by it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from ingot.artifact import open_artifact
from ingot.artifact.kv_geometry import KVGeometry
from ingot.builder import build, prediction
from ingot.builder.prediction import Predictor, TimedStep, fit, latency_figures
from ingot.errors import EngineError
from ingot.pipeline.model.importer import ModelSource
from ingot.pipeline.recipe.load import load_recipe
from ingot.planning.simulation.simulated_executor import EngineShape
from ingot.planning.step_model import StepModel, StepShape, Term, Use
from ingot.validation.evidence import MeasureOptions
from ingot.validation.options import LatencyLoad, MemoryOptions
from ingot.validation.prediction import Prediction, sealed_prediction
from tests.conftest import BuildArtifact
from tests.data_paths import ROOT

LOAD = LatencyLoad(concurrency=(1, 2), prompt_tokens=16, output_tokens=4, requests=2, rounds=2)
SMALL = (
    "evaluation=null",
    "latency={concurrency: [1, 2], prompt_tokens: 16, output_tokens: 4, requests: 2, rounds: 2}",
    "memory=null",
    "gates={}",
)
SHAPE = EngineShape(
    kv=KVGeometry(num_layers=1, num_kv_heads=1, head_dim=8, block_tokens=16, dtype="float32"),
    num_blocks=64,
    max_batch_tokens=64,
    max_sequences=2,
    context_tokens=64,
    vocab_size=100,
)


def predicted(artifact: Path, load: LatencyLoad | None = LOAD) -> Prediction:
    return Predictor().predict(artifact, MeasureOptions(latency=load, memory=None))


@pytest.mark.parametrize("recipe", ["fp32-cpu", "int8-cpu", "int4-cpu"])
def test_a_build_seals_its_prediction_and_the_score(recipe: str, two_layers: Path, tmp_path: Path) -> None:
    artifact = build(recipe, [f"checkpoint={two_layers}", *SMALL], tmp_path / "out").artifact
    sealed = sealed_prediction(artifact)
    assert sealed
    size = sealed.figures["weight_bytes"]
    assert size.low == size.value == size.high == sealed.scores["weight_bytes"].measured
    names = [f"{name}@{level}" for level in (1, 2) for name in ("ttft_seconds", "tpot_seconds", "tokens_per_second")]
    assert set(sealed.scores) == {"weight_bytes", *names}
    for name in names:
        figure, score = sealed.figures[name], sealed.scores[name]
        assert 0 < figure.low < figure.value < figure.high
        assert score.inside == (figure.low <= score.measured <= figure.high)
        assert score.error == pytest.approx(figure.value / score.measured - 1)
        assert "on this machine" in figure.source


def test_the_identity_does_not_depend_on_the_prediction(two_layers: Path, tmp_path: Path) -> None:
    given = [f"checkpoint={two_layers}", "evaluation=null", "memory=null", "gates={}"]
    artifacts = [build("int8-cpu", [*given, SMALL[1]], tmp_path / name / "out").artifact for name in ("a", "b")]
    one, other = (sealed_prediction(artifact) for artifact in artifacts)
    assert one != other  # times are never the same twice
    assert artifacts[0].manifest.identity == artifacts[1].manifest.identity


def test_a_known_step_model_gives_the_latencies_of_its_load() -> None:
    def term(name: str, count: str, seconds: float) -> Term:
        return Term(name, (Use("overhead", count, seconds),))  # type: ignore[arg-type]

    model = StepModel((term("step", "steps", 0.01), term("prompt", "prefill_tokens", 0.001)), "given", 0.25)
    figures = latency_figures(model, SHAPE, LOAD)
    assert figures["ttft_seconds@1"].value == pytest.approx(0.01 + 16 * 0.001)
    assert figures["tpot_seconds@1"].value == pytest.approx(0.01)
    assert figures["tokens_per_second@1"].value == pytest.approx(4 / (0.026 + 3 * 0.01))
    assert figures["ttft_seconds@2"].value == pytest.approx(0.01 + 32 * 0.001)  # two prompts share the first step
    tpot = figures["tpot_seconds@1"]
    assert (tpot.low, tpot.high) == pytest.approx((0.01 / 1.25, 0.01 * 1.25))


def steps(noise: Sequence[float]) -> list[TimedStep]:
    """Steps of 2 ms + 0.1 ms a decoding row, each with these factors of noise."""
    shapes = [StepShape(decode_rows=rows, context_tokens=16 * rows, num_sequences=rows) for rows in (1, 2, 4, 8, 16)]
    seconds = [0.002 + 0.0001 * shape.decode_rows for shape in shapes]
    return [
        TimedStep(shape, tuple(each * factor for factor in noise)) for shape, each in zip(shapes, seconds, strict=True)
    ]


def test_the_interval_widens_with_the_spread_of_repeated_steps() -> None:
    calm, busy = fit(steps((1.0, 1.0, 1.0)), (0, 0)), fit(steps((0.7, 1.0, 1.3)), (0, 0))
    shape = StepShape(decode_rows=3, context_tokens=48, num_sequences=3)
    assert calm.seconds(shape) == pytest.approx(0.0023, rel=1e-3)
    assert busy.seconds(shape) == pytest.approx(0.0023, rel=1e-3)
    assert calm.relative_error < 0.01
    assert busy.relative_error == pytest.approx(0.6, rel=0.01)  # two standard deviations of 0.3


def test_times_of_a_recurrent_model_are_predicted_by_its_own_chunks(build_unmeasured: BuildArtifact) -> None:
    artifact = build_unmeasured("fp32-cpu", ROOT / "examples" / "models" / "stdlib-hybrid-4m")
    assert artifact.manifest.kv.state_bytes
    # A prompt of 4 blocks and a token ends a step at its last full block, where the state is kept.
    for prompt_tokens in (16, 65):
        found = predicted(artifact.path, replace(LOAD, prompt_tokens=prompt_tokens))
        assert not found.left_out
        assert found.figures["tpot_seconds@2"].value > 0


def test_an_engine_that_makes_other_steps_than_the_simulated_one_is_left_out(
    two_layers: Path, build_unmeasured: BuildArtifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = build_unmeasured("int8-cpu", two_layers)
    shape = replace(SHAPE, max_batch_tokens=8, num_blocks=100, vocab_size=100)
    monkeypatch.setattr(prediction, "EngineShape", lambda **_: shape)
    found = predicted(artifact.path)
    assert not found.figures
    [reason] = found.left_out
    assert reason.startswith("latency: the engine makes ")


def test_the_process_that_imports_the_runtime_starts_once_and_before_the_compile(
    two_layers: Path, build_unmeasured: BuildArtifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact, calls = build_unmeasured("int8-cpu", two_layers), list[int]()

    def probe() -> int:
        calls.append(1)
        return 10**8

    monkeypatch.setattr(prediction, "probe_imports", probe)
    recipe = load_recipe("int8-cpu", [f"checkpoint={two_layers}"])
    predictor = Predictor.of_size(recipe, ModelSource.open(two_layers))
    assert predictor.imported
    assert predictor.imported.result() == 10**8
    found = predictor.predict(artifact.path, MeasureOptions(latency=None, memory=MemoryOptions()))
    assert found.figures["peak_memory_bytes"].value > 10**8
    assert len(calls) == 1
    assert Predictor.of_size(load_recipe("int8-cpu", ["memory=null"]), ModelSource.open(two_layers)).imported is None


def test_what_cannot_be_predicted_is_left_out_with_the_reason(
    two_layers: Path, build_unmeasured: BuildArtifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = build_unmeasured("int8-cpu", two_layers)

    def refuse(*_: object) -> None:
        raise EngineError("no steps")

    monkeypatch.setattr(prediction, "timed_steps", refuse)
    found = predicted(artifact.path)
    assert found.figures == {}
    assert found.left_out == ("latency: no steps",)


def test_memory_is_of_the_imports_and_of_what_is_loaded(
    two_layers: Path, build_unmeasured: BuildArtifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prediction, "probe_imports", lambda: 50_000_000)
    options = MeasureOptions(latency=None, memory=MemoryOptions())
    sizes = []
    for recipe in ("fp32-cpu", "int4-cpu"):
        artifact = build_unmeasured(recipe, two_layers)
        figure = Predictor().predict(artifact.path, options).figures["peak_memory_bytes"]
        assert figure.low < figure.value < figure.high
        sizes.append(figure.value - open_artifact(artifact.path).manifest.program_bytes)
    assert min(sizes) > 50_000_000
    assert sizes[0] - sizes[1] < 0.05 * sizes[0]
