"""Segments for onnxruntime's CUDA provider: their numbers, operators and types, refusals."""

import logging

import onnx
import onnx_ir as ir
import onnxruntime  # type: ignore[import-untyped]
import pytest
from benchmarks.programs.segment_numerics import random_feeds, relative_errors

from ingot.artifact.programs.launch_program import ActivationType
from ingot.errors import PassError
from ingot.pipeline.targets.ort_cuda.segment_lowering import OrtSegmentBuilder, lower_ort_segment
from ingot.pipeline.targets.segments.segment import Segment
from ingot.pipeline.targets.segments.stages import SegmentStage
from tests.each_case import each_case
from tests.pipeline.targets.ort_cuda.models import prepared, segments_of
from tests.pipeline.targets.tensorrt.models import FORMS
from tests.sessions import plain_session
from tests.tolerances import within

FAMILIES = ("llama-tied-biases", "gemma2", "gemma3_text", "granite", "olmo2", "phi3-partial-rotary", "qwen3")


def worst_error(segments: list[Segment]) -> float:
    return max(max(relative_errors(segment, random_feeds(segment, 3)).values()) for segment in segments)


def operators(segment: Segment) -> set[str]:
    return {node.op_type for node in segment.model.graph}


@each_case("form", FORMS)
def test_every_form_of_weights_computes_the_same_as_the_ir(form: str) -> None:
    segments = segments_of(prepared(form))
    limit = "segments.activations" if "activations" in form else "parity.float32"
    assert within(limit, worst_error([*segments[:2], segments[-1]]), form)


@each_case("family", FAMILIES)
def test_every_family_computes_the_same_as_the_ir(family: str) -> None:
    assert within("parity.float32", worst_error(segments_of(prepared(checkpoint=family))), family)


def test_float16_weights_and_activations_compute_the_same_as_the_ir() -> None:
    for form in ("plain", "int4-zero-points"):
        assert within("segments.fp16", worst_error(segments_of(prepared(form), "fp16")), form)


@each_case("compute", ["fp16", "bf16"])
@each_case("form", ["plain", "int4-zero-points", "int8", "fp8"])
def test_types_and_shapes_of_16_bit_segments_are_consistent(form: str, compute: ActivationType) -> None:
    for segment in segments_of(prepared(form), compute):
        proto = ir.to_proto(segment.model)
        onnx.checker.check_model(onnx.shape_inference.infer_shapes(proto, strict_mode=True, data_prop=True))
        floats = {value.dtype for value in segment.model.graph.inputs if value.dtype is not None}
        assert floats <= {segment_dtype(compute), ir.DataType.INT64, ir.DataType.UINT8}
        if compute == "fp16":  # onnxruntime checks types of Microsoft's operators, too
            assert isinstance(plain_session(segment.model), onnxruntime.InferenceSession)


def segment_dtype(compute: ActivationType) -> ir.DataType:
    return {"fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16, "fp32": ir.DataType.FLOAT}[compute]


def test_quantized_weights_become_microsofts_matmul_and_gather() -> None:
    first, layer, *_ = segments_of(prepared("int4-zero-points"))
    assert "GatherBlockQuantized" in operators(first)
    assert {"MatMulNBits", "RMSNormalization"} <= operators(layer)
    assert not operators(layer) & {"Gemm", "DequantizeLinear"}
    assert layer.constant_bytes == 0


def test_an_embedding_that_is_the_head_is_one_weight_in_two_shapes() -> None:
    first, *_, head = segments_of(prepared("int8-zero-points", "llama-tied-biases"))

    def codes(segment: Segment) -> dict[str, tuple[int, ...]]:
        return {weight.name: weight.shape for weight in segment.weights.values() if "embed_tokens" in weight.name}

    shared = codes(first).keys() & codes(head).keys()
    assert shared == {f"model.embed_tokens.weight.nbits.{part}" for part in ("codes", "scales", "zero_points")}
    name = "model.embed_tokens.weight.nbits.codes"
    assert len(codes(first)[name]) == 2
    assert len(codes(head)[name]) == 3


def test_float8_weights_are_stored_in_the_activations_type_with_a_log_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    layer = segments_of(prepared("fp8"), "bf16")[1]
    assert "Gemm" in operators(layer)
    assert "mlp.down_proj: onnxruntime has no float8 matmul; the weight is stored in bf16" in caplog.text


def test_quantized_activations_need_no_reduce_max_of_cudnn() -> None:
    layer = segments_of(prepared("int8-activations"))[1]
    assert {"TopK", "QuantizeLinear", "MatMulNBits"} <= operators(layer)
    assert "ReduceMax" not in operators(layer)


def test_quantized_activations_in_bfloat16_are_refused_by_name() -> None:
    with pytest.raises(PassError, match=r"'layers.0.self_attn.qkv_proj' reads activations in 8 bits, .*to float16"):
        segments_of(prepared("int8-activations"), "bf16")


def test_swish_becomes_standard_ops_and_other_domains_are_refused() -> None:
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["T", 8]))
    swish = ir.node("Swish", [x], {"alpha": 2.0}, name="swish")
    strange = ir.node("Twist", [swish.outputs[0]], domain="twisted", name="twist")
    for node in (swish, strange):
        node.outputs[0].shape, node.outputs[0].type = x.shape, x.type
    graph = ir.Graph([x], [strange.outputs[0]], nodes=[swish, strange])
    assert len(graph) == 2
    lowered = lower_ort_segment(SegmentStage((swish,), (swish.outputs[0],)), "fp16")
    assert [node.op_type for node in lowered.model.graph] == ["Mul", "Sigmoid", "Mul"]
    with pytest.raises(PassError, match=r"'twist' \(twisted::Twist\) has no form in onnxruntime; leave its pass out"):
        lower_ort_segment(SegmentStage((strange,), (strange.outputs[0],)), "fp16")


def test_the_builder_imports_microsofts_operators() -> None:
    assert OrtSegmentBuilder.of([], "fp16").graph.opset_imports["com.microsoft"] == 1
