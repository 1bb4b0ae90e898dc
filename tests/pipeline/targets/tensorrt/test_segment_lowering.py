"""Lowered segments: their numbers, sharing between layers, refusals."""

import onnx_ir as ir
import pytest
from benchmarks.programs.segment_numerics import random_feeds, relative_errors

from ingot.artifact.launch_program import ActivationType
from ingot.errors import PassError
from ingot.passes.manager import PassManager
from ingot.passes.numerics.activation_rounding import ActivationScheme, Kind
from ingot.passes.quantization.activation_nodes import insert_activation_quantization
from ingot.passes.registry import make_pass
from ingot.passes.weights import weight_sites
from ingot.pipeline.targets.segments.segment import Segment
from tests.each_case import each_case
from tests.oracle.cases import CASES
from tests.pipeline.targets.tensorrt.models import CHANNEL, FORMS, prepared, segments_of
from tests.tolerances import within

DENSE = ("cohere2", "gpt_neox", "granite_swa", "hunyuan_v1_dense")  # LayerNorm, parallel, sinks, norms after rope
FAMILIES = sorted([*(case.name for case in CASES), *DENSE])


def worst_error(segments: list[Segment]) -> float:
    return max(max(relative_errors(segment, random_feeds(segment, 3)).values()) for segment in segments)


def structures(segments: list[Segment]) -> int:
    return len({ir.to_proto(segment.model).SerializeToString(deterministic=True) for segment in segments})


@each_case("form", FORMS)
def test_every_form_of_weights_computes_the_same_as_the_ir(form: str) -> None:
    segments = segments_of(prepared(form))
    assert within(_tolerance(form, "fp16"), worst_error([*segments[:2], segments[-1]]), form)


@pytest.mark.parametrize("form", ["plain", "int4-zero-points", "int8", "fp8"])
def test_bfloat16_weights_compute_the_same_as_the_ir(form: str) -> None:
    segments = segments_of(prepared(form), "bf16")
    assert within(_tolerance(form, "bf16"), worst_error([segments[1], segments[-1]]), form)


@each_case("family", FAMILIES)
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


def _tolerance(form: str, compute: ActivationType) -> str:
    return "segments.activations" if "activations" in form else f"segments.{compute}"


@pytest.mark.parametrize("kind", ["int", "float"])
def test_a_static_scale_is_an_input_so_that_layers_share_a_plan(kind: Kind) -> None:
    model = prepared()
    linears = [site.node for site in weight_sites(model) if site.role == "linear"]
    for number, gemm in enumerate(linears):
        source = gemm.inputs[0]
        assert source is not None
        insert_activation_quantization(model.graph, source, [gemm], ActivationScheme(kind, 0.01 + 0.001 * number))
    weights = (
        ("quantize-weights", {**CHANNEL, "symmetric": True}) if kind == "int" else ("fp8", {"activations": "none"})
    )
    PassManager([make_pass(*weights)]).run(model)
    segments = segments_of(model)
    layer = segments[1]
    assert "layers.0.mlp.down_proj.input.dequantize.inverse" in layer.weights
    assert layer.model.graph.num_nodes() == segments[2].model.graph.num_nodes()
    worst = max(relative_errors(layer, random_feeds(layer, 3)).values())
    assert within("segments.activations", worst, f"static {kind}")


def test_a_computed_weight_is_refused_by_name() -> None:
    model = prepared()
    gemm = next(node for node in model.graph if node.name == "layers.0.mlp.down_proj")
    source = next(node for node in model.graph if node.name == "layers.0.mlp.gated")
    gemm.replace_input_with(1, source.outputs[0])
    with pytest.raises(PassError, match=r"'layers.0.mlp.down_proj' multiplies by 'layers.0.mlp.gated', which is comp"):
        segments_of(model)
