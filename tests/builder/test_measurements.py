"""A recipe's measurements become validation's options, and are refused before a build on a machine without its GPU."""

from types import SimpleNamespace

import pytest

from ingot.builder import measurements
from ingot.builder.measurements import (
    measure_options,
    require_gpu,
    require_required_gates,
    require_tokenizer,
)
from ingot.errors import DataError, EngineError, UsageError
from ingot.pipeline.recipe.load import load_recipe
from ingot.pipeline.recipe.schema import Recipe
from ingot.validation.gates import GateSpec
from ingot.validation.options import AccuracyOptions, GenerationOptions, MemoryOptions, ServiceLevel
from tests.data_paths import FIXTURES, ROOT

MEASURED = (f"evaluation.text={ROOT / 'README.md'}",)
PRECISION = "passes.quantize-kv-cache.precision"


def use_gpu(monkeypatch: pytest.MonkeyPatch, sm: int | None) -> None:
    """Pretend that the machine has one GPU of this SM, or none."""

    def open_device() -> SimpleNamespace:
        if sm is None:
            raise EngineError("no GPU here")
        return SimpleNamespace(name="a GPU", sm=sm, close=lambda: None)

    monkeypatch.setattr(measurements, "open_device", open_device)


def recipe(*overrides: str) -> Recipe:
    return load_recipe("int4-cuda", overrides)


def test_without_a_gpu_only_unmeasured_or_cpu_recipes_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    use_gpu(monkeypatch, None)
    require_gpu(recipe())
    require_gpu(load_recipe("int4-cpu", MEASURED))
    with pytest.raises(UsageError, match=r"target cuda-sm90, which needs such a GPU: no GPU here.*evaluation=null"):
        require_gpu(recipe(*MEASURED))


@pytest.mark.parametrize(
    ("target", "sm", "allowed"), [("cuda-sm90", 90, True), ("cuda-sm80", 86, True), ("cuda-sm90", 89, False)]
)
def test_a_gpu_that_cannot_run_the_program_is_refused(
    target: str, sm: int, allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_gpu(monkeypatch, sm)
    wanted = recipe(*MEASURED, f"target={target}")
    if allowed:
        require_gpu(wanted)
    else:
        with pytest.raises(UsageError, match="a GPU has SM 89, and the program is for SM 90"):
            require_gpu(wanted)


def test_sections_of_the_recipe_become_options_of_validation() -> None:
    measured = recipe(
        *MEASURED,
        "seed=7",
        "evaluation.tokens=256",
        "evaluation.window_tokens=64",
        "latency={concurrency: [1, 4], rounds: 3, slo: {ttft_seconds: 0.5, tpot_seconds: 0.1}}",
        "gates={kl_mean: {max: 0.25}, top1_agreement: {min: 0.5, advisory: true}}",
    )
    options = measure_options(measured)
    assert options.text == ROOT / "README.md"
    assert options.accuracy == AccuracyOptions(tokens=256, window_tokens=64, seed=7)
    assert options.gates == (GateSpec("kl_mean", "max", 0.25), GateSpec("top1_agreement", "min", 0.5, advisory=True))
    assert options.latency is not None
    assert (options.latency.concurrency, options.latency.rounds, options.latency.seed) == ((1, 4), 3, 7)
    assert options.latency.slo == ServiceLevel(0.5, 0.1)
    assert options.memory == MemoryOptions()


def test_generations_are_compared_by_default_where_the_kv_cache_is_rounded() -> None:
    assert measure_options(recipe(*MEASURED)).generation is None
    for precision in ("bfloat16", "fp8", "int8", "int4", "k8v4"):
        rounded = load_recipe("int4-kv8-cpu", [*MEASURED, f"{PRECISION}={precision}"])
        assert measure_options(rounded).generation == GenerationOptions(16, 64, 512)
    assert measure_options(load_recipe("int4-kv8-cpu", [*MEASURED, "evaluation.generations=0"])).generation is None
    fewer = ("evaluation.generations=4", "evaluation.generation_tokens=32")
    assert measure_options(recipe(*MEASURED, *fewer)).generation == GenerationOptions(4, 64, 32)


def test_generations_of_float16_keys_and_values_are_compared_on_request_alone() -> None:
    for precision in ("float32", "float16"):
        given = [*MEASURED, f"{PRECISION}={precision}"]
        assert measure_options(load_recipe("int4-kv8-cpu", given)).generation is None
        assert measure_options(load_recipe("int4-kv8-cpu", [*given, "evaluation.generations=2"])).generation is not None


def test_memory_probes_follow_the_recipe() -> None:
    probed = recipe(*MEASURED, "memory={probes: 5, prompt_tokens: 8, output_tokens: 4}")
    assert measure_options(probed).memory == MemoryOptions(probes=5, prompt_tokens=8, output_tokens=4)
    assert measure_options(recipe(*MEASURED, "memory=null")).memory is None


def test_a_recipe_without_evaluation_latency_and_gates_is_not_measured() -> None:
    nothing = recipe("evaluation=null", "latency=null", "gates={}")
    assert not nothing.is_measured
    assert (measure_options(nothing).accuracy, measure_options(nothing).latency) == (None, None)
    assert recipe("evaluation=null", "latency=null", "gates={size_ratio: {max: 0.5}}").is_measured


def test_a_text_for_a_checkpoint_without_a_tokenizer_is_refused() -> None:
    tiny = f"checkpoint={FIXTURES / 'checkpoints' / 'llama'}"
    with pytest.raises(DataError, match=r"holds no tokenizer\.json, so no text can be evaluated or generated"):
        require_tokenizer(recipe(tiny, *MEASURED))
    assert require_tokenizer(recipe(tiny, "evaluation=null", "generate=null")) is None


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ((), "measures nothing"),
        (("latency={}",), "measures, but has no gates"),
        ((*MEASURED, "gates=null"), "measures, but has no gates"),
        ((*MEASURED, "gates={kl_mean: {max: 0.1, advisory: true}}"), "measures, but has only advisory gates"),
    ],
)
def test_required_gates_are_required_before_any_work(overrides: tuple[str, ...], reason: str) -> None:
    with pytest.raises(UsageError, match=rf"recipe int4-cuda {reason}, and gates are required"):
        require_required_gates(recipe(*overrides))


def test_default_gates_and_gates_of_ones_own_are_enough() -> None:
    require_required_gates(recipe(*MEASURED))
    require_required_gates(recipe("gates={size_ratio: {max: 0.5}}"))


def test_default_gates_apply_to_what_is_measured() -> None:
    assert measure_options(recipe("latency={}")).gates == ()
    assert {gate.metric for gate in measure_options(recipe(*MEASURED)).gates} == {"perplexity_ratio", "kl_mean"}
