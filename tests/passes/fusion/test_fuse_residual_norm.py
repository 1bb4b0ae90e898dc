"""fuse-residual-norm: IR before and after, equal numbers, refusals."""

import numpy as np
import onnx_ir as ir
import pytest

from ingot.errors import PassError
from ingot.passes.fusion.fuse_residual_norm import FuseResidualNorm
from ingot.passes.printing import model_to_text
from tests.passes.snippets import Snippet, op_types, random, run

AFTER = """\
input  x: FLOAT[T,8]
input  branch: FLOAT[T,8]
weight gamma: FLOAT[8]
%norm, _, _, %sum = com.microsoft::SkipSimplifiedLayerNormalization(%x, %branch, %gamma) \
{epsilon=1e-06}  # norm, FLOAT[T,8], FLOAT[T,8]
%next = Add(%sum, %norm)  # next, FLOAT[T,8]
output next: FLOAT[T,8]
"""


def _residual(is_sum_read: bool = True, axis: int = -1) -> ir.Model:
    """norm(x + branch), and that plus the sum when the sum is read again."""
    s = Snippet()
    total = s.node("Add", "sum", [s.input("x", "T", 8), s.input("branch", "T", 8)], "T", 8)
    gamma = s.weight("gamma", random(8, seed=3))
    normed = s.node("RMSNormalization", "norm", [total, gamma], "T", 8, axis=axis, epsilon=1e-6)
    return s.output(s.node("Add", "next", [total, normed], "T", 8) if is_sum_read else normed)


def test_addition_and_norm_become_one_node_that_also_makes_the_sum() -> None:
    model = _residual()
    assert FuseResidualNorm()(model).modified
    assert model_to_text(model) == AFTER


def test_a_sum_that_only_the_norm_reads_is_omitted() -> None:
    model = _residual(is_sum_read=False)
    FuseResidualNorm()(model)
    assert [len(node.outputs) for node in model.graph] == [1]


@pytest.mark.parametrize("is_sum_read", [True, False])
def test_outputs_are_equal_before_and_after(is_sum_read: bool) -> None:
    model = _residual(is_sum_read)
    feeds = {"x": random(5, 8), "branch": random(5, 8, seed=1)}
    before = run(model, **feeds)
    FuseResidualNorm()(model)
    np.testing.assert_allclose(run(model, **feeds)[0], before[0], rtol=2e-6, atol=1e-6)


def test_a_sum_that_is_a_graph_output_keeps_its_name() -> None:
    s = Snippet()
    total = s.node("Add", "sum", [s.input("x", "T", 8), s.input("branch", "T", 8)], "T", 8)
    gamma = s.weight("gamma", random(8))
    normed = s.node("RMSNormalization", "norm", [total, gamma], "T", 8, axis=-1, epsilon=1e-6)
    model = s.output(total, normed)
    FuseResidualNorm()(model)
    assert [value.name for value in model.graph.outputs] == ["sum", "norm"]
    feeds = {"x": random(2, 8), "branch": random(2, 8, seed=1)}
    np.testing.assert_array_equal(run(model, **feeds)[0], feeds["x"] + feeds["branch"])


def test_a_second_run_changes_nothing() -> None:
    model = _residual()
    FuseResidualNorm()(model)
    assert not FuseResidualNorm(strict=True)(model).modified
    assert model_to_text(model) == AFTER


def test_a_post_norm_does_not_match() -> None:
    s = Snippet()
    x, branch = s.input("x", "T", 8), s.input("branch", "T", 8)
    normed = s.node("RMSNormalization", "norm", [branch, s.weight("g", random(8))], "T", 8, axis=-1, epsilon=1e-6)
    model = s.output(s.node("Add", "sum", [x, normed], "T", 8))
    assert not FuseResidualNorm()(model).modified
    assert op_types(model) == ["RMSNormalization", "Add"]


def test_an_addition_that_broadcasts_is_refused_by_name() -> None:
    s = Snippet()
    total = s.node("Add", "bias", [s.input("x", "T", 8), s.weight("b", random(8))], "T", 8)
    normed = s.node("RMSNormalization", "norm", [total, s.weight("g", random(8))], "T", 8, axis=-1, epsilon=1e-6)
    model = s.output(normed)
    assert not FuseResidualNorm()(model).modified
    with pytest.raises(PassError, match=r"node 'bias' does not add two \[tokens, hidden\] values of one shape"):
        FuseResidualNorm(strict=True)(model)


def test_a_sum_that_is_read_before_the_norm_is_refused() -> None:
    s = Snippet()
    total = s.node("Add", "sum", [s.input("x", "T", 8), s.input("branch", "T", 8)], "T", 8)
    early = s.node("Sigmoid", "early", [total], "T", 8)
    normed = s.node("RMSNormalization", "norm", [total, s.weight("g", random(8))], "T", 8, axis=-1, epsilon=1e-6)
    model = s.output(early, normed)
    with pytest.raises(PassError, match="node 'early' reads the sum before the norm 'norm'"):
        FuseResidualNorm(strict=True)(model)


def test_a_norm_over_another_axis_is_refused() -> None:
    with pytest.raises(PassError, match="node 'norm' does not normalize the last axis in float32"):
        FuseResidualNorm(strict=True)(_residual(axis=0))
