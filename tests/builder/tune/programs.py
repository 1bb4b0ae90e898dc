"""Programs of the tiny llama for tests of the tuner."""

from typing import Any

import onnx_ir as ir

from ingot.artifact.programs.launch_program import CudaProgram
from ingot.passes.manager import PassManager
from ingot.passes.model_facts import MODEL
from ingot.passes.registry import make_pass
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.model.importer import import_checkpoint
from ingot.pipeline.targets.cuda.lowering import LoweredLaunches
from ingot.pipeline.targets.cuda.program_builder import TILE_QUERIES, Bucket
from tests.data_paths import FIXTURES

CONTEXT = 32


BUCKETS = (Bucket.decode(1, CONTEXT), Bucket.decode(32, CONTEXT), Bucket.ragged(128, CONTEXT, 4))


QUANTIZED: tuple[str, dict[str, Any]] = ("quantize-weights", {"bits": 4, "block_size": 32, "lm_head": "none"})


def imported(*quantization: tuple[str, dict[str, Any]]) -> ir.Model:
    made = import_checkpoint(Checkpoint.open(FIXTURES / "checkpoints" / "llama"))
    passes = ("fold-constants", "pack-projections", *quantization, "fuse-residual-norm", "fuse-rotary-attention")
    entries: list[tuple[str, dict[str, Any]]] = [one if isinstance(one, tuple) else (one, {}) for one in passes]
    PassManager([make_pass(name, options) for name, options in [*entries, ("clean-up", {})]]).run(made)
    return made


def program_of(model: ir.Model, lowered: LoweredLaunches) -> CudaProgram:
    facts = MODEL.of(model)
    return CudaProgram(
        sms=(90,),
        activation_type="fp16",
        kv=lowered.shared.kv,
        vocab_size=facts.vocab_size,
        context_tokens=CONTEXT,
        tile_queries=TILE_QUERIES,
        kernels=lowered.shared.kernels,
        cubins={},
        programs=lowered.programs,
    )
