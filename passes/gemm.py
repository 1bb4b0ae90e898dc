"""What the IR's linear layers look like: Gemm(x, W, b?, transB=1), and nothing else of what Gemm can do."""

import onnx_ir as ir

from ingot.errors import PassError


def require_plain_gemm(node: ir.Node) -> None:
    """Raise PassError when the node is a Gemm other than x @ W.T + b."""
    if node.op_type != "Gemm":
        return
    attributes = node.attributes
    plain = {
        "transA": attributes.get_int("transA", 0) == 0,
        "transB": attributes.get_int("transB", 0) == 1,
        "alpha": attributes.get_float("alpha", 1.0) == 1.0,
        "beta": attributes.get_float("beta", 1.0) == 1.0,
    }
    for attribute, holds in plain.items():
        if not holds:
            raise PassError(f"{node.name!r} is no x @ W.T + b: its {attribute} is not what the IR's linear layers have")
