"""A quantized checkpoint's weights as tensors of the IR: small ones at once, codes and floats each time they are read.

Nothing large is held: whoever writes or packs a weight has it decoded, uses it, and lets it go.
"""

import onnx_ir as ir

from ingot.passes.quantization.quantized_tensors import code_tensor
from ingot.pipeline.formats.encoded import EncodedTensor
from ingot.pipeline.formats.integer_form import IntegerForm, integer_form


def form_tensors(source: EncodedTensor, form: IntegerForm) -> list[ir.TensorProtocol]:
    """Codes, scale and, when asymmetric, zero point: the operands of DequantizeLinear."""
    name = source.name
    tensors: list[ir.TensorProtocol] = [_lazy_codes(source, form), ir.Tensor(form.scale, name=f"{name}.scale")]
    if form.zero_point is not None:
        tensors.append(code_tensor(form.zero_point, form.bits, f"{name}.zero_point"))
    return tensors


def float_tensor(source: EncodedTensor) -> ir.LazyTensor:
    """The weight as float32."""
    return ir.LazyTensor(
        lambda: ir.Tensor(source.dequantize()), ir.DataType.FLOAT, ir.Shape(source.shape), name=source.name
    )


def _lazy_codes(source: EncodedTensor, form: IntegerForm) -> ir.LazyTensor:
    name, shape = f"{source.name}.q", ir.Shape(source.shape)
    kind = "INT" if form.zero_point is None else "UINT"

    def decode() -> ir.TensorProtocol:
        again = integer_form(source.read())
        assert isinstance(again, IntegerForm), "it was one when the model was imported"
        return code_tensor(again.codes, again.bits, name)

    return ir.LazyTensor(decode, ir.DataType[f"{kind}{max(form.bits, 4)}"], shape, name=name)
