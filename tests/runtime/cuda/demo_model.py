"""The demo model in the interpreted launch program and in the onnxruntime executor: logits and greedy tokens."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ingot.artifact import Artifact
from ingot.artifact.programs.launch_program import ActivationType
from ingot.passes.manager import PassManager
from ingot.passes.registry import make_pass
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.model.importer import import_checkpoint
from ingot.pipeline.targets.cuda.program_builder import Bucket
from ingot.pipeline.targets.cuda.tiles import TileTable
from ingot.runtime import Engine, SamplingParams, Tokenizer
from ingot.runtime.cuda.executor import CudaExecutor
from ingot.runtime.options import EngineOptions
from tests.data_paths import DEMO_MODEL
from tests.runtime.cuda.artifacts import write_artifact
from tests.simulators.interpreted_device import InterpretedDevice

PROMPT = "def read_file(path):\n"
CONTEXT = 64
_RAGGED_ROWS = 16

# Matmuls of the reference in float32, as in the launch program: by default the CPU engine rounds activations.
EXACT = "{lower-onnxruntime-cpu: {accuracy_level: 0}}"
_QUANTIZED: dict[str, object] = {"bits": 4, "block_size": 32, "lm_head": "none", "embedding": 8}
_QUANTIZATION: dict[str, list[str]] = {"float": [], "int4": [f"{{quantize-weights: {json.dumps(_QUANTIZED)}}}"]}
_PREPARED = ("fold-constants", "pack-projections", "fuse-gated-activation")
_LOWERED = ("fuse-residual-norm", "fuse-rotary-attention", "clean-up")

# Relative to the largest logit: float32 differs by the order of sums, float16 by its 11 bits in every layer.
TOLERANCES: dict[ActivationType, float] = {"fp32": 2e-5, "fp16": 5e-3}


@dataclass(frozen=True)
class Comparison:
    """Greedy tokens of both, and the largest difference of logits over prompt and output, of the largest logit."""

    found: tuple[int, ...]
    wanted: tuple[int, ...]
    logits_error: float


def compare(
    weights: str,
    activation_type: ActivationType,
    tokens: int,
    folder: Path,
    build: Callable[..., Artifact],
    tiles: TileTable | None = None,
) -> Comparison:
    """Generate from PROMPT on both. build(recipe, checkpoint, *overrides) makes the reference, unmeasured."""
    passes = ", ".join([*_PREPARED, *_QUANTIZATION[weights], "fuse-rotary-attention", EXACT, "clean-up"])
    reference = build("fp32-cpu", DEMO_MODEL, f"passes=[{passes}]")
    executor = CudaExecutor(
        launches(weights, activation_type, folder, tiles), InterpretedDevice(), EngineOptions(kv_blocks=8)
    )
    tokenizer = Tokenizer.load(DEMO_MODEL)
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    with Engine(executor, tokenizer, max_sequences=1) as gpu, Engine.load(reference, kv_blocks=8) as host:
        found, wanted = (engine.generate(PROMPT, params).token_ids for engine in (gpu, host))
        ids = [*tokenizer.encode(PROMPT), *wanted][:CONTEXT]
        one, other = gpu.prompt_logits(ids), host.prompt_logits(ids)
    return Comparison(found, wanted, float(np.abs(one - other).max() / np.abs(other).max()))


def launches(weights: str, activation_type: ActivationType, folder: Path, tiles: TileTable | None = None) -> Artifact:
    """The demo model's launch program; its head takes the rows of a whole prompt at once."""
    quantized = [make_pass("quantize-weights", _QUANTIZED)] if weights == "int4" else []
    passes = [*map(make_pass, _PREPARED), *quantized, *map(make_pass, _LOWERED)]
    model = import_checkpoint(Checkpoint.open(DEMO_MODEL))
    PassManager(passes).run(model)
    buckets = (Bucket.decode(1, CONTEXT), Bucket.ragged(_RAGGED_ROWS, CONTEXT, _RAGGED_ROWS))
    return write_artifact(model, folder, buckets, activation_type, tiles=tiles)
