"""The pass round-scales: rounds the scales of quantized weights to float16 numbers.

    Matched         DequantizeLinear(q, scale, zero_point?)
    Replacement     the same with float32(float16(scale))

GPTQ, AWQ and GGUF store scales in 16 bits, and so does the native CPU engine where float16 holds all scales of a
weight. With this pass after the quantizer, an artifact and a checkpoint exported from the same recipe have the same
weights, bit for bit. A scale changes by less than 1 part in 2000. Engines still compute with float32 scales.

Refuses: a scale above float16's largest number, 65504, by the weight's name.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from ingot.errors import PassError
from ingot.passes.base import Pass, PassKind


@dataclass(frozen=True)
class RoundScales(Pass):
    """No options."""

    name: ClassVar[str] = "round-scales"
    kind: ClassVar[PassKind] = "quantization"
    summary: ClassVar[str] = "Rounds scales of quantized weights to float16, which GPTQ, AWQ and GGUF files hold."
    changes_weights: ClassVar[bool] = False
    keeps_schemes: ClassVar[bool] = True

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Round the scales of one weight after the other."""
        scales = dict.fromkeys(node.inputs[1] for node in model.graph if node.op_type == "DequantizeLinear")
        changed = [scale for scale in scales if scale is not None and _round(scale)]
        return ir.passes.PassResult(model, modified=bool(changed))


def _round(scale: ir.Value) -> bool:
    """Round one initializer; return whether a number changed."""
    tensor = scale.const_value
    if tensor is None or tensor.dtype != ir.DataType.FLOAT:
        return False
    before = np.asarray(tensor.numpy())
    with np.errstate(over="ignore"):
        after = before.astype(np.float16).astype(np.float32)
    if not np.isfinite(after).all():
        raise PassError(
            f"round-scales: {scale.name!r} holds {before.max():g}, above float16's largest number, 65504; export to "
            "compressed-tensors, whose scales are float32"
        )
    scale.const_value = ir.Tensor(after, name=scale.name)
    return not np.array_equal(before, after)
