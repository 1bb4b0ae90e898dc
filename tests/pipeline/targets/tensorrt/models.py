"""Small models for the tests of TensorRT: fixtures of families, quantized in every form, after the target's passes."""

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from ingot.artifact.programs.launch_program import ActivationType
from ingot.passes.manager import PassManager
from ingot.passes.registry import make_pass
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.model.importer import import_checkpoint
from ingot.pipeline.targets.segments.segment import Segment
from ingot.pipeline.targets.segments.stages import SegmentStage, split_stages
from ingot.pipeline.targets.table import get_target
from ingot.pipeline.targets.tensorrt.segment_lowering import is_kernel, lower_segment, pack_attention_operands
from tests.data_paths import FIXTURES

Passes = tuple[tuple[str, Mapping[str, Any]], ...]
TABLE = {"embed_tokens": {"block_size": 32}}  # the smallest block that the gather's kernel takes
CHANNEL = {"bits": 8, "block_size": "channel"}
FORMS: dict[str, Passes] = {
    "plain": (),
    "int4": (("quantize-weights", {"block_size": 16, "symmetric": True, "lm_head": 4, "overrides": TABLE}),),
    "int4-zero-points": (
        ("quantize-weights", {"block_size": 16, "symmetric": False, "lm_head": 4, "overrides": TABLE}),
    ),
    "int4-rows": (("quantize-weights", {"block_size": "channel", "symmetric": True, "lm_head": 4}),),
    "int3": (("quantize-weights", {"bits": 3, "block_size": 32, "symmetric": True, "lm_head": 3}),),
    "int8": (("quantize-weights", {**CHANNEL, "symmetric": True}),),
    "int8-zero-points": (("quantize-weights", {**CHANNEL, "symmetric": False}),),
    "int8-activations": (("quantize-activations", {}), ("quantize-weights", {**CHANNEL, "symmetric": True})),
    "int8-activations-zero-points": (
        ("quantize-activations", {}),
        ("quantize-weights", {**CHANNEL, "symmetric": False}),
    ),
    "int4-int8-activations": (
        ("quantize-activations", {}),
        ("quantize-weights", {"block_size": 32, "symmetric": True, "lm_head": 4}),
    ),
    "fp8": (("fp8", {"activations": "none"}),),
    "fp8-activations": (("fp8", {"activations": "dynamic"}),),
}


def quantized(form: str = "plain", checkpoint: str = "llama") -> ir.Model:
    """A fixture's IR, packed and quantized, before any lowering."""
    model = import_checkpoint(Checkpoint.open(FIXTURES / "checkpoints" / checkpoint), check_weights=False)
    names = ("fold-constants", "pack-projections", "clean-up")
    passes = [*map(make_pass, names), *(make_pass(name, options) for name, options in FORMS[form])]
    PassManager(passes).run(model)
    return model


def prepared(form: str = "plain", checkpoint: str = "llama") -> ir.Model:
    """A fixture's IR as the target's writer gets it."""
    model = quantized(form, checkpoint)
    PassManager([make_pass(name) for name in get_target("tensorrt").lowering]).run(model)
    pack_attention_operands(model.graph)
    return model


def segments_of(model: ir.Model, compute: ActivationType = "fp16") -> list[Segment]:
    """Every segment of a prepared model."""
    return [
        lower_segment(stage, compute)
        for stage in split_stages(model.graph, is_kernel)
        if isinstance(stage, SegmentStage)
    ]
