"""Small models for tests of onnxruntime's CUDA provider: fixtures after the target's passes, and segments."""

import onnx_ir as ir

from ingot.artifact.programs.launch_program import ActivationType
from ingot.passes.manager import PassManager
from ingot.passes.registry import make_pass
from ingot.pipeline.targets.ort_cuda.segment_lowering import is_kernel, lower_ort_segment
from ingot.pipeline.targets.segments.segment import Segment
from ingot.pipeline.targets.segments.stages import SegmentStage, split_stages
from ingot.pipeline.targets.table import get_target
from tests.pipeline.targets.tensorrt.models import quantized


def prepared(form: str = "plain", checkpoint: str = "llama") -> ir.Model:
    """A fixture's IR as the target's writer gets it."""
    model = quantized(form, checkpoint)
    PassManager([make_pass(name) for name in get_target("ort-cuda").lowering]).run(model)
    return model


def segments_of(model: ir.Model, compute: ActivationType = "fp32") -> list[Segment]:
    """Every segment of a prepared model."""
    stages = split_stages(model.graph, is_kernel)
    return [lower_ort_segment(stage, compute) for stage in stages if isinstance(stage, SegmentStage)]
