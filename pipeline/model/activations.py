"""The activations of feed-forwards, as nodes of the IR."""

from collections.abc import Callable

import onnx_ir as ir

from ingot.pipeline.model.graph_builder import GraphBuilder, dims

_GELU = {"gelu": "none", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}
_QUICK_ALPHA = 1.702


def activation(b: GraphBuilder, name: str, path: str, x: ir.Value, weight: Callable[[str], ir.Value]) -> ir.Value:
    """Append the activation that config.json calls `name`; `weight` gives a tensor of the feed-forward by its path."""
    shape = dims(x)
    match name:
        case "silu":
            sigmoid = b.op("Sigmoid", f"{path}.sigmoid", [x], shape)
            return b.op("Mul", f"{path}.activation", [x, sigmoid], shape)
        case "quick_gelu":
            scaled = b.op("Mul", f"{path}.sigmoid.scaled", [x, b.scalar(_QUICK_ALPHA)], shape)
            sigmoid = b.op("Sigmoid", f"{path}.sigmoid", [scaled], shape)
            return b.op("Mul", f"{path}.activation", [x, sigmoid], shape)
        case "relu":
            return b.op("Relu", f"{path}.activation", [x], shape)
        case "relu2":
            positive = b.op("Relu", f"{path}.relu", [x], shape)
            return b.op("Mul", f"{path}.activation", [positive, positive], shape)
        case "xielu":
            return _xielu(b, path, x, weight)
        case _:
            return b.op("Gelu", f"{path}.activation", [x], shape, approximate=_GELU[name])


def clamped_swiglu(b: GraphBuilder, path: str, gate: ir.Value, up: ir.Value, alpha: float, limit: float) -> ir.Value:
    """Append g * sigmoid(alpha * g) * (u + 1), g = min(gate, limit), u = up within -limit .. limit (gpt-oss)."""
    shape = dims(gate)
    g = b.op("Min", f"{path}.gate.clamped", [gate, b.scalar(limit)], shape)
    u = b.op("Clip", f"{path}.up.clamped", [up, b.scalar(-limit), b.scalar(limit)], shape)
    scaled = b.op("Mul", f"{path}.sigmoid.scaled", [g, b.scalar(alpha)], shape)
    swish = b.op("Mul", f"{path}.activation", [g, b.op("Sigmoid", f"{path}.sigmoid", [scaled], shape)], shape)
    raised = b.op("Add", f"{path}.up.raised", [u, b.scalar(1.0)], shape)
    return b.op("Mul", f"{path}.gated", [swish, raised], shape)


def _xielu(b: GraphBuilder, path: str, x: ir.Value, weight: Callable[[str], ir.Value]) -> ir.Value:
    """xIELU (arXiv 2411.13010), with four weights for each layer.

    a_p * x^2 + beta * x                             for x > 0, a_p = softplus(alpha_p)
    a_n * (exp(min(x, eps)) - 1 - x) + beta * x      else, a_n = beta + softplus(alpha_n)
    """
    shape = dims(x)
    alpha_p, alpha_n, beta, eps = (weight(f"act_fn.{name}") for name in ("alpha_p", "alpha_n", "beta", "eps"))
    rise = b.op("Softplus", f"{path}.xielu.rise", [alpha_p], [1])
    fall = b.op("Add", f"{path}.xielu.fall", [b.op("Softplus", f"{path}.xielu.softplus", [alpha_n], [1]), beta], [1])
    squared = b.op("Mul", f"{path}.xielu.squared", [x, x], shape)
    above = b.op("Mul", f"{path}.xielu.above", [squared, rise], shape)
    capped = b.op("Min", f"{path}.xielu.capped", [x, eps], shape)
    exponential = b.op("Elu", f"{path}.xielu.elu", [capped], shape, alpha=1.0)
    curve = b.op("Sub", f"{path}.xielu.curve", [exponential, x], shape)
    below = b.op("Mul", f"{path}.xielu.below", [curve, fall], shape)
    is_above = b.op("Greater", f"{path}.xielu.is_above", [x, b.scalar(0.0)], shape)
    is_above.dtype = ir.DataType.BOOL
    bent = b.op("Where", f"{path}.xielu.bent", [is_above, above, below], shape)
    line = b.op("Mul", f"{path}.xielu.line", [x, beta], shape)
    return b.op("Add", f"{path}.activation", [bent, line], shape)
