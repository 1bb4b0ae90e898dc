"""The demo model through its launch program, interpreted, beside the onnxruntime executor: logits and greedy tokens."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from ingot.artifact import Artifact
from ingot.artifact.launch_program import ActivationType
from ingot.passes.manager import PassManager
from ingot.passes.registry import make_pass
from ingot.pipeline.checkpoint import Checkpoint
from ingot.pipeline.cuda.program_builder import Bucket
from ingot.pipeline.importer import import_checkpoint
from ingot.runtime import Engine, SamplingParams, Tokenizer
from ingot.runtime.batch import FloatArray
from ingot.runtime.executor_loading import ExecutorOptions
from ingot.runtime.executors.cuda import CudaExecutor
from tests.conftest import BuildArtifact
from tests.data_paths import DEMO_MODEL
from tests.runtime.cuda.artifacts import write_artifact
from tests.runtime.cuda.interpreted_device import InterpretedDevice

PROMPT = "def read_file(path):\n"
TOKENS = 12
CONTEXT = 64
QUANTIZED = {"int4-cpu": ("quantize-weights", {"bits": 4, "block_size": 32}), "fp32-cpu": None}

# Of the largest logit: float32 differs by the order of its sums, float16 by its 11 bits in every layer.
TOLERANCES: dict[ActivationType, float] = {"fp32": 2e-5, "fp16": 5e-3}


@cache
def prompt_ids() -> tuple[int, ...]:
    return tuple(Tokenizer.load(DEMO_MODEL).encode(PROMPT))


@pytest.fixture(params=[("fp32-cpu", "fp32"), ("int4-cpu", "fp32"), ("int4-cpu", "fp16")], ids=" ".join)
def pair(
    request: pytest.FixtureRequest, build_unmeasured: BuildArtifact, tmp_path: Path
) -> Iterator[tuple[Engine, Engine, float]]:
    """The demo model on the interpreted device and on the CPU, and how far their logits may be apart."""
    recipe, activation_type = request.param
    overrides = ["passes.quantize-weights.block_size=32"] if recipe == "int4-cpu" else []
    reference = build_unmeasured(recipe, DEMO_MODEL, *overrides)
    launched = launches(recipe, activation_type, tmp_path / "launches")
    executor = CudaExecutor(launched, InterpretedDevice(), ExecutorOptions(kv_blocks=8))
    tokenizer = Tokenizer.load(DEMO_MODEL)
    with (
        Engine(executor, tokenizer, max_sequences=1) as card,
        Engine.load(reference, kv_blocks=8) as host,
    ):
        yield card, host, TOLERANCES[activation_type]


def launches(recipe: str, activation_type: ActivationType, folder: Path) -> Artifact:
    quantized = QUANTIZED[recipe]
    passes = [make_pass(name) for name in ("fold-constants", "pack-projections", "clean-up")]
    passes += [make_pass(*quantized)] if quantized else []
    passes += [make_pass(name) for name in ("fuse-residual-norm", "fuse-rotary-attention", "clean-up")]
    model = import_checkpoint(Checkpoint.open(DEMO_MODEL))
    PassManager(passes).run(model)
    return write_artifact(model, folder, (Bucket.decode(1, CONTEXT), Bucket.ragged(16, CONTEXT, 1)), activation_type)


def test_greedy_tokens_are_equal_and_logits_close(pair: tuple[Engine, Engine, float]) -> None:
    card, host, tolerance = pair
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    found, wanted = (engine.generate(prompt_ids(), params).token_ids for engine in pair[:2])
    assert found == wanted
    ids = [*prompt_ids(), *wanted][:CONTEXT]
    one, other = card.prompt_logits(ids), host.prompt_logits(ids)
    assert error_of(one, other) <= tolerance


def error_of(found: FloatArray, wanted: FloatArray) -> float:
    """Largest difference, of the largest logit."""
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())
