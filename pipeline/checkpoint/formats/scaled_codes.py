"""A matrix of codes with scales of its blocks, of its rows, or one: quant_method fp8, fbgemm_fp8 and bitnet.

fp8: e4m3 as DeepSeek, Qwen, Mistral and transformers' FineGrainedFP8 store them

    weight              float8_e4m3 [out, in]
    weight_scale_inv    the scales, float or e8m0 [out / rows, in / columns] for blocks of weight_block_size, the last
                        of which may be smaller; a scalar without blocks. Weights are multiplied by them, in spite of
                        the name. AutoFP8 calls them weight_scale.
    activation_scale    scalar of a static activation_scheme; AutoFP8 calls it input_scale

fbgemm_fp8, as in Meta's own Llama 3.1 405B, has one scale for each row: weight_scale, float [out, 1].

bitnet: -1, 0 and 1 (BitNet b1.58, arXiv 2402.17764)

    weight          uint8 [out / 4, in]    code + 1 of four rows a byte, the lowest bits first: those of rows r, out / 4
                                           + r, out / 2 + r and 3 * out / 4 + r
    weight_scale    float [1]              what codes are divided by; multiplied, if linear_class is autobitlinear

Such models are trained with inputs that are rounded to 8 bits for each token: add the pass quantize-activations.

(Sources: transformers integrations/finegrained_fp8.py, fbgemm_fp8.py and bitnet.py, AutoFP8 auto_fp8/modeling.py.)
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BeforeValidator

from ingot.errors import ConfigError
from ingot.pipeline.checkpoint.formats.activations import InputScheme
from ingot.pipeline.checkpoint.formats.codes import from_e4m3, from_e8m0
from ingot.pipeline.checkpoint.formats.decoded import DecodedWeight
from ingot.pipeline.checkpoint.formats.leaves import BYTES, E8M0, FLOATS, FP8, SCALAR, Leaf, Sizes, Stored
from ingot.pipeline.checkpoint.formats.quant_method import Arrays, QuantMethod, readable, unsupported
from ingot.sizes import ceil_div

_SCALES = ("weight_scale_inv", "weight_scale")
_ROWS_PER_BYTE = 4


def _block(value: Any) -> Any:
    match value:
        case None:
            return None
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
    raise ValueError("it must be [rows, columns] of a block, or null for one scale a layer")


class Fp8Method(QuantMethod):
    """quant_method fp8."""

    title = "fp8"

    weight_block_size: Annotated[tuple[int, int] | None, BeforeValidator(_block)] = None
    activation_scheme: Literal["dynamic", "static"] = "dynamic"
    fmt: Annotated[str, readable(("e4m3", "float8_e4m3fn"))] = "e4m3"
    expert_dtype: Annotated[str, readable(("fp8",))] = "fp8"

    def table(self, module: str) -> Sequence[Leaf]:
        shapes = SCALAR if self.weight_block_size is None else [("block rows", "block columns")]
        scales = (Leaf(name, (*FLOATS, *E8M0), shapes, is_needed=False) for name in _SCALES)
        return (Leaf("weight", FP8, [("out", "in")]), *scales)

    def sizes(self, module: str, leaves: Stored) -> Sizes:
        found = [name for name in _SCALES if name in leaves]
        if len(found) != 1:
            raise ConfigError(f"has {' and '.join(found) or 'no scales'}; fp8 needs one of {' and '.join(_SCALES)}")
        rows, columns = leaves["weight"].shape
        height, width = self.weight_block_size or (rows, columns)
        blocks = {"block rows": ceil_div(rows, height), "block columns": ceil_div(columns, width)}
        return {"out": rows, "in": columns, **blocks}

    def decode(self, module: str, arrays: Arrays) -> DecodedWeight:
        stored = next(arrays[name] for name in _SCALES if name in arrays)
        scales = from_e8m0(stored) if stored.dtype == np.uint8 else stored.astype(np.float32)
        codes = from_e4m3(arrays["weight"])
        rows, columns = codes.shape
        if self.weight_block_size is None:
            return DecodedWeight(codes, np.full((rows, 1), scales.reshape(()), np.float32), columns, bits=8)
        height, width = self.weight_block_size
        return DecodedWeight(codes, np.repeat(scales, height, axis=0)[:rows], min(width, columns), bits=8)

    def activations_of(self, module: str) -> InputScheme:
        if self.activation_scheme == "static":
            return InputScheme(8, "float", dynamic=False, strategy="tensor")
        if self.weight_block_size is None:
            return InputScheme(8, "float", dynamic=True, strategy="token")
        return InputScheme(8, "float", dynamic=True, strategy="group", group_size=self.weight_block_size[1])


class FbgemmFp8Method(QuantMethod):
    """quant_method fbgemm_fp8."""

    title = "fbgemm_fp8"

    def table(self, module: str) -> Sequence[Leaf]:
        return (Leaf("weight", FP8, [("out", "in")]), Leaf("weight_scale", FLOATS, [("out", 1)]))

    def sizes(self, module: str, leaves: Stored) -> Sizes:
        rows, columns = leaves["weight"].shape
        return {"out": rows, "in": columns}

    def decode(self, module: str, arrays: Arrays) -> DecodedWeight:
        codes = from_e4m3(arrays["weight"])
        return DecodedWeight(codes, arrays["weight_scale"].astype(np.float32), codes.shape[1], bits=8)

    def activations_of(self, module: str) -> InputScheme:
        return InputScheme(8, "float", dynamic=True, strategy="token")


class BitNetMethod(QuantMethod):
    """quant_method bitnet."""

    title = "bitnet"

    linear_class: Literal["bitlinear", "autobitlinear"] = "bitlinear"
    quantization_mode: Annotated[
        str,
        readable(("offline",), " of bitnet: an online checkpoint has no codes yet, take the packed one of the model"),
    ] = "offline"
    use_rms_norm: Annotated[bool, unsupported("norms in front of every layer are not read")] = False

    def table(self, module: str) -> Sequence[Leaf]:
        return (Leaf("weight", BYTES, [("packed", "in")]), Leaf("weight_scale", FLOATS, SCALAR))

    def sizes(self, module: str, leaves: Stored) -> Sizes:
        packed, columns = leaves["weight"].shape
        return {"packed": packed, "out": packed * _ROWS_PER_BYTE, "in": columns}

    def decode(self, module: str, arrays: Arrays) -> DecodedWeight:
        parts = [arrays["weight"] >> np.uint8(2 * part) & np.uint8(3) for part in range(_ROWS_PER_BYTE)]
        codes = np.concatenate(parts).astype(np.int8) - np.int8(1)
        if codes.max(initial=0) > 1:
            raise ValueError("a code is 3; codes are 0 to 2")
        scale = arrays["weight_scale"].astype(np.float32).reshape(())
        if scale == 0:
            raise ValueError("weight_scale is 0")
        scale = scale if self.linear_class == "autobitlinear" else np.float32(1) / scale
        return DecodedWeight(codes, np.full((len(codes), 1), scale, np.float32), codes.shape[1], bits=2)

    def activations_of(self, module: str) -> InputScheme:
        return InputScheme(8, "int", dynamic=True, strategy="token")
