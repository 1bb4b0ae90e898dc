"""The text form of the IR: readable, stable, without the weights' values."""

import numpy as np
import onnx_ir as ir

from ingot.passes.model_facts import CHECKPOINT
from ingot.passes.printing import model_to_text
from tests.passes.snippets import Snippet, random
from tests.passes.tiny_decoder import TinyDecoder

TEXT = """\
ingot.checkpoint tiny
input  x: FLOAT[T,4]
weight w: FLOAT16[8,4]
weight scale: FLOAT[] = [0.1]
%w.float32 = Cast(%w) {to=1}  # w.float32, FLOAT[8,4]
%proj = Gemm(%x, %w.float32) {transB=1}  # proj, FLOAT[T,8]
%y = Mul(%proj, %scale)  # y, FLOAT[T,8]
output y: FLOAT[T,8]
"""


def _model() -> ir.Model:
    s = Snippet()
    CHECKPOINT.record(s.model, "tiny")
    x, stored = s.input("x", "T", 4), s.weight("w", random(8, 4, dtype=np.float16))
    scale = s.weight("scale", np.array(0.1, np.float32))
    cast = s.node("Cast", "w.float32", [stored], 8, 4, to=ir.DataType.FLOAT)
    return s.output(s.node("Mul", "y", [s.node("Gemm", "proj", [x, cast], "T", 8, transB=1), scale], "T", 8))


def test_the_text_shows_inputs_weights_nodes_and_outputs() -> None:
    assert model_to_text(_model()) == TEXT


def test_equal_programs_print_equal_text() -> None:
    assert model_to_text(TinyDecoder().model) == model_to_text(TinyDecoder().model)


def test_a_custom_op_is_shown_with_domain_and_sorted_attributes() -> None:
    line = next(line for line in model_to_text(TinyDecoder().model).splitlines() if "PagedAttention" in line)
    assert " = ingot::PagedAttention(" in line
    assert "{head_dim=16, layer=0, num_heads=4, num_kv_heads=2, scale=0.25, softcap=0.0, window=0}" in line
