"""The part of lowering that all engines share: fused ops, and ops that an engine has no form for."""

import pytest
from benchmarks.programs.segment_numerics import random_feeds, relative_errors

from ingot.errors import PassError
from ingot.passes.manager import PassManager
from ingot.passes.registry import make_pass
from ingot.pipeline.targets.segments.segment import Segment
from ingot.pipeline.targets.segments.stages import SegmentStage, split_stages
from ingot.pipeline.targets.tensorrt.segment_lowering import is_kernel, lower_segment
from tests.pipeline.targets.tensorrt.models import prepared, segments_of
from tests.tolerances import within


def worst_error(segments: list[Segment]) -> float:
    return max(max(relative_errors(segment, random_feeds(segment, 3)).values()) for segment in segments)


def test_fused_norms_and_activations_become_standard_ops_again() -> None:
    model = prepared()
    PassManager([make_pass("fuse-residual-norm"), make_pass("fuse-gated-activation")]).run(model)
    segments = segments_of(model)
    assert {node.domain for segment in segments for node in segment.model.graph} == {""}
    assert within("segments.fp16", worst_error(segments), "fused")


def test_a_fused_op_of_another_engine_is_refused_with_its_name() -> None:
    model = prepared()
    gate = next(node for node in model.graph if node.op_type == "Sigmoid")
    gate.domain, gate.op_type = "com.microsoft", "BiasGelu"
    stage = next(s for s in split_stages(model.graph, is_kernel) if isinstance(s, SegmentStage) and gate in s.nodes)
    with pytest.raises(PassError, match=r"'layers.0.mlp.sigmoid' \(com.microsoft::BiasGelu\) has no form in TensorRT"):
        lower_segment(stage, "fp16")
