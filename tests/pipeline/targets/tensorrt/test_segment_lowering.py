"""Lowered segments: their numbers, sharing between layers, refusals."""

import onnx_ir as ir
import pytest
from benchmarks.programs.segment_numerics import random_feeds, relative_errors

from ingot.artifact.launch_program import ActivationType
from ingot.errors import PassError
from ingot.passes.manager import PassManager
from ingot.passes.registry import make_pass
from ingot.pipeline.targets.segments.segment import Segment
from ingot.pipeline.targets.segments.stages import SegmentStage, split_stages
from ingot.pipeline.targets.tensorrt.segment_lowering import is_kernel, lower_segment
from tests.data_paths import FIXTURES
from tests.pipeline.targets.tensorrt.models import FORMS, prepared, segments_of
from tests.tolerances import within

FAMILIES = sorted(path.parent.name for path in (FIXTURES / "checkpoints").glob("*/config.json"))


def worst_error(segments: list[Segment]) -> float:
    return max(max(relative_errors(segment, random_feeds(segment, 3)).values()) for segment in segments)


def structures(segments: list[Segment]) -> int:
    return len({ir.to_proto(segment.model).SerializeToString(deterministic=True) for segment in segments})


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_weights_computes_the_same_as_the_ir(form: str) -> None:
    segments = segments_of(prepared(form))
    assert within(_tolerance(form, "fp16"), worst_error([*segments[:2], segments[-1]]), form)


@pytest.mark.parametrize("form", ["plain", "int4-zero-points", "int8", "fp8"])
def test_bfloat16_weights_compute_the_same_as_the_ir(form: str) -> None:
    segments = segments_of(prepared(form), "bf16")
    assert within(_tolerance(form, "bf16"), worst_error([segments[1], segments[-1]]), form)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_computes_the_same_as_the_ir_and_its_layers_have_one_structure(family: str) -> None:
    segments = segments_of(prepared(checkpoint=family))
    assert within("segments.fp16", worst_error(segments), family)
    assert structures(segments) == 4  # before the first attention, between two, after the last, the head


def test_int4_is_a_constant_and_everything_else_an_input() -> None:
    layer = segments_of(prepared("int4"))[1]
    assert layer.constant_bytes
    assert not any("proj" in name for name in layer.weights)
    assert {"int4", "fp16"} == layer.number_formats
    assert not segments_of(prepared("int8"))[1].constant_bytes


def test_a_message_gets_the_models_layer_numbers_back() -> None:
    layer = segments_of(prepared())[2]
    assert layer.with_original_layers("no form for 'layers.0.mlp.down_proj'") == "no form for 'layers.1.mlp.down_proj'"
    assert layer.name == "layers.2.self_attn.qkv_proj"


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


def _tolerance(form: str, compute: ActivationType) -> str:
    return "segments.activations" if "activations" in form else f"segments.{compute}"
