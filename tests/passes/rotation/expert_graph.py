"""A graph with two parallel feed-forwards, for tests of the residual stream."""

from typing import Any

import numpy as np
import onnx_ir as ir

from tests.passes.snippets import Snippet


def branches(width: int, post_norm: Any = None) -> ir.Model:
    """A stream with two parallel feed-forwards that read one norm, weighted per token: a mixture of experts.

    post_norm    weight of a norm on the output of each feed-forward
    """
    snippet, random = Snippet(), np.random.default_rng(0)

    def weight(name: str, *shape: int) -> ir.Value:
        return snippet.weight(name, random.standard_normal(shape).astype(np.float32))

    ids = ir.Value(name="input_ids", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(["T"]))
    snippet.graph.inputs.append(ids)
    stream = snippet.node("Gather", "embed", [weight("table", 9, width), ids], "T", width, axis=0)
    normed = snippet.node("RMSNormalization", "norm", [stream, weight("norm.weight", width)], "T", width, axis=-1)
    for expert in "ab":
        route = snippet.node("Gemm", f"{expert}.router", [normed, weight(f"{expert}.r", 1, width)], "T", 1, transB=1)
        up = snippet.node("Gemm", f"{expert}.up", [normed, weight(f"{expert}.u", 8, width)], "T", 8, transB=1)
        act = snippet.node("Relu", f"{expert}.act", [up], "T", 8)
        down = snippet.node("Gemm", f"{expert}.down", [act, weight(f"{expert}.d", width, 8)], "T", width, transB=1)
        if post_norm is not None:
            weighted = snippet.weight(f"{expert}.post.weight", np.full(width, post_norm, np.float32))
            down = snippet.node("RMSNormalization", f"{expert}.post", [down, weighted], "T", width, axis=-1)
        routed = snippet.node("Mul", f"{expert}.routed", [down, route], "T", width)
        stream = snippet.node("Add", f"{expert}.add", [stream, routed], "T", width)
    last = snippet.node("RMSNormalization", "last", [stream, weight("last.weight", width)], "T", width, axis=-1)
    snippet.graph.outputs.append(
        snippet.node("Gemm", "head", [last, weight("head.weight", 9, width)], "T", 9, transB=1)
    )
    return snippet.model
