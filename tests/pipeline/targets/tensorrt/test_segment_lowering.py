"""Lowered segments: their numbers, sharing between layers, refusals."""

import onnx_ir as ir
import pytest
from benchmarks.programs.segment_numerics import random_feeds, relative_errors

from ingot.artifact.programs.launch_program import ActivationType
from ingot.pipeline.targets.segments.segment import Segment
from tests.each_case import each_case
from tests.oracle.cases import CASES
from tests.pipeline.targets.tensorrt.models import FORMS, prepared, segments_of
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
