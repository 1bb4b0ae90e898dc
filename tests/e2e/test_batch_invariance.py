"""Batch invariance on real logits: the output of a request depends on its prompt and parameters alone, bit for bit.

Many requests with shared prefixes run at once in a KV pool that is too small for them, so that they are batched,
chunked, preempted and served from the prefix cache. Each must get the same logits as alone.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from ingot.artifact import Artifact
from ingot.artifact.manifest import CPU_ENGINES
from ingot.runtime import Completion, Engine, SamplingParams
from tests.conftest import THREADS, BuildArtifact
from tests.data_paths import DEMO_MODEL, ROOT, shared_data

FEW = 24  # requests that still preempt each other; all 64 run on the whole model
FEW_SEQUENCES = ("calibration.text=checkpoint:heldout.txt", "calibration.sequences=4")
WHOLE = ["fp32-cpu", "int4-cpu"]
RECIPES: list[tuple[str, tuple[str, ...]]] = [
    ("int4-cpu", ("passes.quantize-weights.block_size=32",)),
    ("int8-cpu", ()),
    ("w8a8-cpu", ("passes.smooth-quant.alpha=none",)),
    ("w8a8-cpu", (*FEW_SEQUENCES, "passes.smooth-quant={alpha: 0.5, activations: static, outliers: 2}")),
    ("fp8-cpu-emulation", ()),
    *(
        ("fp32-cpu", (f"passes=[pack-projections, clean-up, {{quantize-kv-cache: {{precision: {precision}}}}}]",))
        for precision in ("float16", "bfloat16", "fp8", "int8", "int4", "int4, group: 0", "k8v4")
    ),
    ("int4-kv8-cpu", ()),
]
OUTLIERS, FLOAT8 = RECIPES[3], RECIPES[4]  # onnxruntime's alone: see docs/cpu.md
BOTH = [
    (recipe, (*overrides, f"cpu.engine={engine}"))
    for recipe, overrides in RECIPES
    for engine in CPU_ENGINES
    if engine == "onnxruntime" or (recipe, overrides) not in (OUTLIERS, FLOAT8)
]
NANS = [(recipe, overrides) for recipe, overrides in BOTH if recipe not in ("int8-cpu", "fp8-cpu-emulation")]


def requests(artifact: Artifact, seed: int, count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of 1 to 90 tokens, half of them with a common prefix; greedy and sampled."""
    rng = np.random.default_rng(seed)
    vocabulary = artifact.manifest.model.vocab_size
    common = rng.integers(3, vocabulary, 40).tolist()
    prompts, params = [], []
    for number in range(count):
        own = rng.integers(3, vocabulary, int(rng.integers(1, 50))).tolist()
        prompts.append(common + own if number % 2 else own)
        temperature = 0.0 if number % 3 else 0.9
        params.append(
            SamplingParams(max_tokens=int(rng.integers(1, 64)), temperature=temperature, seed=number, ignore_eos=True)
        )
    return prompts, params


def assert_equal_bits(together: Sequence[Completion], alone: Sequence[Completion]) -> None:
    for one, other in zip(together, alone, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logits is not None
        assert other.logits is not None
        assert np.array_equal(one.logits.view(np.int32), other.logits.view(np.int32))


def check(artifact: Artifact, num_blocks: int, max_batch_tokens: int, count: int = FEW) -> None:
    prompts, params = requests(artifact, 7, count)
    with Engine.load(artifact, kv_blocks=1024, max_batch_tokens=512, prefix_cache=False) as engine:
        alone = [engine.generate(p, s, keep_logits=True) for p, s in zip(prompts, params, strict=True)]
    with Engine.load(artifact, kv_blocks=num_blocks, max_batch_tokens=max_batch_tokens, max_sequences=32) as engine:
        together = engine.generate(prompts, params, keep_logits=True)
        metrics = engine.metrics()
    assert_equal_bits(together, alone)
    assert metrics.blocks_in_use == 0
    assert metrics.num_preemptions > 0
    assert metrics.prefix_hit_tokens > 0


@pytest.mark.parametrize("engine", CPU_ENGINES)
@pytest.mark.parametrize("recipe", WHOLE)
def test_64_requests_through_a_small_pool_get_what_each_gets_alone(
    build_unmeasured: BuildArtifact, recipe: str, engine: str
) -> None:
    artifact = build_unmeasured(recipe, DEMO_MODEL, f"cpu.engine={engine}")
    check(artifact, num_blocks=24, max_batch_tokens=72, count=64)


@pytest.mark.parametrize(("recipe", "overrides"), BOTH)
def test_every_kind_of_layer_is_batch_invariant(
    build_unmeasured: BuildArtifact, two_layers: Path, recipe: str, overrides: tuple[str, ...]
) -> None:
    """Two layers run every kernel that six run."""
    check(build_unmeasured(recipe, two_layers, *overrides), num_blocks=24, max_batch_tokens=72)


@pytest.mark.parametrize(("recipe", "overrides"), NANS)
def test_damaged_keys_and_values_end_their_request_and_change_no_other_bit(
    build_unmeasured: BuildArtifact, two_layers: Path, recipe: str, overrides: tuple[str, ...]
) -> None:
    """Its blocks, full of NaN, are used again by requests that follow."""
    artifact = build_unmeasured(recipe, two_layers, *overrides)
    prompts, params = requests(artifact, 8, FEW)
    with Engine.load(artifact, kv_blocks=24, max_batch_tokens=72, max_sequences=32) as engine:
        expected = engine.generate(prompts, params, keep_logits=True)
        ids = [engine.add(prompt, its, keep_logits=True) for prompt, its in zip(prompts, params, strict=True)]
        done: dict[int, Completion] = {}
        damaged: set[int] = set()
        while engine.has_unfinished():
            running = [number for number in engine._loop.scheduler.running if number not in damaged]
            if running and len(damaged) < 3:  # each has a block of its own at the end of its table
                damaged.add(running[-1])
                blocks = engine._executor._pool.blocks  # type: ignore[attr-defined]
                blocks[engine._blocks.table(running[-1])[-1]] = 0xFF  # NaN in every type
            done |= {output.request_id: output.completion for output in engine.step() if output.completion}
            engine.check()
        failed = {number for number, completion in done.items() if completion.error}
        assert failed
        assert failed <= damaged, "a new block of a prompt is written before it is read"
        others = [number for number in ids if number not in failed]
        assert_equal_bits([done[number] for number in others], [expected[number - ids[0]] for number in others])
        assert_equal_bits(engine.generate(prompts, params, keep_logits=True), expected)


@pytest.mark.parametrize("engine", CPU_ENGINES)
@pytest.mark.parametrize("recipe", WHOLE)
def test_an_ffn_width_that_no_vector_width_divides_is_batch_invariant(
    build_unmeasured: BuildArtifact, recipe: str, engine: str
) -> None:
    artifact = build_unmeasured(recipe, shared_data("models/stories260K"), f"cpu.engine={engine}")
    check(artifact, num_blocks=24, max_batch_tokens=61)


@pytest.mark.parametrize("engine", CPU_ENGINES)
@pytest.mark.parametrize("recipe", WHOLE)
def test_two_threads_are_batch_invariant(
    build_unmeasured: BuildArtifact, two_layers: Path, recipe: str, engine: str
) -> None:
    """In a process of its own: onnxruntime's pool keeps its size for the life of a process, and a worker's has one."""
    path = build_unmeasured(recipe, two_layers, f"cpu.engine={engine}").path
    code = f"""
from ingot.artifact import open_artifact
from ingot.runtime import Engine
from tests.e2e.test_batch_invariance import check
check(open_artifact({str(path)!r}), num_blocks=24, max_batch_tokens=72)
with Engine.load({str(path)!r}) as engine:
    assert engine._executor.num_threads == 2
"""
    environment = {**os.environ, **dict.fromkeys(THREADS, "2")}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True)
