"""pack-projections: IR before and after, equal numbers, refusals."""

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from ingot.errors import PassError
from ingot.passes.fusion.pack_projections import PackProjections
from ingot.passes.printing import model_to_text
from tests.passes.snippets import FLOAT, Snippet, op_types, random, run

PATH = "layers.0.self_attn"
AFTER = """\
input  x: FLOAT[T,8]
weight model.layers.0.self_attn.qkv_proj.weight: FLOAT16[12,8]
weight integers.6.3.3: INT64[3] = [6, 3, 3]
%model.layers.0.self_attn.qkv_proj.weight.float32 = Cast(%model.layers.0.self_attn.qkv_proj.weight) {to=1}  \
# model.layers.0.self_attn.qkv_proj.weight.float32, FLOAT[12,8]
%layers.0.self_attn.qkv_proj = Gemm(%x, %model.layers.0.self_attn.qkv_proj.weight.float32) {transB=1}  \
# layers.0.self_attn.qkv_proj, FLOAT[T,12]
%layers.0.self_attn.q_proj, %layers.0.self_attn.k_proj, %layers.0.self_attn.v_proj = \
Split(%layers.0.self_attn.qkv_proj, %integers.6.3.3) {axis=-1}  # layers.0.self_attn.qkv_split, \
FLOAT[T,6], FLOAT[T,3], FLOAT[T,3]
output layers.0.self_attn.q_proj: FLOAT[T,6]
output layers.0.self_attn.k_proj: FLOAT[T,3]
output layers.0.self_attn.v_proj: FLOAT[T,3]
"""


def _attention(dtype: Any = np.float32, biases: str = "", other_dtype: str = "") -> ir.Model:
    """q, k, v projections of x [T, 8] to 6, 3 and 3 columns; `biases` and `other_dtype` name parts ("qkv")."""
    s = Snippet()
    x = s.input("x", "T", 8)
    made = [_linear(s, part, x, rows, dtype, biases, other_dtype) for part, rows in (("q", 6), ("k", 3), ("v", 3))]
    return s.output(*made)


def _linear(s: Snippet, part: str, x: ir.Value, rows: int, dtype: Any, biases: str, other_dtype: str) -> ir.Value:
    name = f"model.{PATH}.{part}_proj"
    stored = np.float16 if part in other_dtype else dtype
    inputs = [x, _widened(s, f"{name}.weight", random(rows, 8, seed=rows, dtype=stored))]
    if part in biases:
        inputs.append(_widened(s, f"{name}.bias", random(rows, seed=ord(part), dtype=stored)))
    return s.node("Gemm", f"{PATH}.{part}_proj", inputs, "T", rows, transB=1)


def _widened(s: Snippet, name: str, array: Any) -> ir.Value:
    stored = s.weight(name, array)
    return stored if stored.dtype == FLOAT else s.node("Cast", f"{name}.float32", [stored], *array.shape, to=FLOAT)


def test_three_projections_become_one_matmul_and_a_split() -> None:
    model = _attention(np.float16)
    assert PackProjections()(model).modified
    assert model_to_text(model) == AFTER


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("biases", ["", "qkv"])
def test_packed_projections_give_the_same_outputs(dtype: Any, biases: str) -> None:
    model = _attention(dtype, biases)
    x = random(5, 8, seed=9)
    before = run(model, x=x)
    assert PackProjections()(model).modified
    for packed, alone in zip(run(model, x=x), before, strict=True):
        np.testing.assert_allclose(packed, alone, rtol=1e-6, atol=1e-6)


def test_gate_and_up_are_packed_under_one_name() -> None:
    s = Snippet()
    x = s.input("x", "T", 8)
    gate = s.node("Gemm", "mlp.gate_proj", [x, s.weight("m.gate_proj.weight", random(4, 8))], "T", 4, transB=1)
    up = s.node("Gemm", "mlp.up_proj", [x, s.weight("m.up_proj.weight", random(4, 8, seed=1))], "T", 4, transB=1)
    model = s.output(gate, up)
    PackProjections(strict=True)(model)
    assert op_types(model) == ["Gemm", "Split"]
    assert "m.gate_up_proj.weight" in model.graph.initializers


def test_the_packed_weight_is_concatenated_when_it_is_read() -> None:
    model = _attention()
    PackProjections()(model)
    tensor = model.graph.initializers[f"model.{PATH}.qkv_proj.weight"].const_value
    assert isinstance(tensor, ir.LazyTensor)
    assert not tensor.cache
    expected = np.concatenate([random(rows, 8, seed=rows) for rows in (6, 3, 3)])
    np.testing.assert_array_equal(tensor.numpy(), expected)


def test_a_second_run_changes_nothing() -> None:
    model = _attention()
    PackProjections()(model)
    text = model_to_text(model)
    assert not PackProjections(strict=True)(model).modified
    assert model_to_text(model) == text


def test_packed_checkpoints_do_not_match_and_are_accepted() -> None:
    s = Snippet()
    x = s.input("x", "T", 8)
    model = s.output(s.node("Gemm", f"{PATH}.qkv_proj", [x, s.weight("w", random(12, 8))], "T", 12, transB=1))
    assert not PackProjections(strict=True)(model).modified


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (_attention(biases="q"), f"node '{PATH}.k_proj' and '{PATH}.q_proj' differ in having a bias"),
        (
            _attention(other_dtype="v"),
            f"node '{PATH}.v_proj' has 'model.{PATH}.v_proj.weight' in FLOAT16, unlike 'model.{PATH}.q_proj.weight' in",
        ),
    ],
)
def test_projections_that_differ_are_refused_with_node_and_reason(model: ir.Model, message: str) -> None:
    before = model_to_text(model)
    assert not PackProjections()(model).modified
    assert model_to_text(model) == before
    with pytest.raises(PassError, match=f"strict, and a fusion did not happen: {message}"):
        PackProjections(strict=True)(model)


def test_projections_of_different_inputs_are_refused() -> None:
    s = Snippet()
    gate_input, up_input = s.input("a", "T", 8), s.input("b", "T", 8)
    gate = s.node("Gemm", "mlp.gate_proj", [gate_input, s.weight("wg", random(4, 8))], "T", 4, transB=1)
    up = s.node("Gemm", "mlp.up_proj", [up_input, s.weight("wu", random(4, 8))], "T", 4, transB=1)
    model = s.output(gate, up)
    with pytest.raises(PassError, match=r"node 'mlp.up_proj' reads another input than 'mlp.gate_proj'"):
        PackProjections(strict=True)(model)


def test_strict_refuses_a_model_without_projections() -> None:
    s = Snippet()
    x = s.input("x", "T", 8)
    model = s.output(s.node("Sigmoid", "s", [x], "T", 8))
    with pytest.raises(PassError, match="pack-projections: strict, and nothing in the model resembles its pattern"):
        PackProjections(strict=True)(model)
