"""quant_method bitsandbytes: nf4 and fp4 in blocks, int8 by rows, as transformers saves a model that it quantized.

4 bits: the numbers of a weight [out, in] are one line of blocks, which may cross the ends of rows

    weight                     uint8 [bytes, 1]     two codes a byte, the high half first
    weight.quant_map           float32 [16]         the number of each code
    weight.absmax              float32 [blocks]     the factor of each block
    weight.quant_state.bitsandbytes__nf4, __fp4     JSON in bytes: shape, blocksize
    weight.nested_absmax       float32 [nested blocks]    with double quantization absmax are bytes, and a factor is
    weight.nested_quant_map    float32 [256]              nested_quant_map[byte] * its nested_absmax + nested_offset

8 bits

    weight           int8 [out, in]
    SCB              float32 [out]      the number of code 127 of a row
    weight_format    uint8, 0: rows as they are

Weights are decoded in float32, where the package rounds them to its compute type. The inputs that LLM.int8() rounds to
8 bits stay as the engine computes them.

(Sources: bitsandbytes functional.py, QuantState; nn/modules.py, Linear8bitLt.)
"""

from collections.abc import Sequence
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from ingot.artifact.json_text import parse_json
from ingot.errors import ConfigError
from ingot.pipeline.checkpoint.formats.activations import CONTRADICTION
from ingot.pipeline.checkpoint.formats.codes import ByteArray, FloatArray
from ingot.pipeline.checkpoint.formats.decoded import DecodedWeight
from ingot.pipeline.checkpoint.formats.leaves import BYTES, Leaf, Sizes, Stored
from ingot.pipeline.checkpoint.formats.quant_method import Arrays, QuantMethod, Settings, first_message, readable
from ingot.sizes import ceil_div

_STATE_BYTES = 4096
_Size = Annotated[int, Field(ge=1, le=1 << 40)]
_BlockSize = Annotated[int, Field(ge=1, le=4096)]


class _State(Settings):
    """What the package notes of a weight of 4 bits."""

    shape: Annotated[list[_Size], Field(min_length=2, max_length=2)]
    blocksize: _BlockSize
    nested_blocksize: _BlockSize = 1
    nested_offset: float = 0.0


class BitsAndBytes(QuantMethod):
    """quant_method bitsandbytes."""

    title = "bitsandbytes"

    load_in_4bit: bool = False
    load_in_8bit: bool = False
    bnb_4bit_quant_type: Literal["fp4", "nf4"] = "fp4"
    bnb_4bit_use_double_quant: bool = False
    bnb_4bit_quant_storage: Annotated[str, readable(("uint8",), " of bitsandbytes")] = "uint8"

    @model_validator(mode="after")
    def _has_one_width(self) -> Self:
        if self.load_in_4bit == self.load_in_8bit:
            message = "one of load_in_4bit and load_in_8bit must be true, the other false"
            raise PydanticCustomError(CONTRADICTION, message)
        return self

    def table(self, module: str) -> Sequence[Leaf]:
        if self.load_in_8bit:
            form = Leaf("weight_format", BYTES, [(), (1,)], is_needed=False)
            return (Leaf("weight", ("I8",), [("out", "in")]), Leaf("SCB", ("F32",), [("out",)]), form)
        nested = self.bnb_4bit_use_double_quant
        leaves = (
            Leaf("weight", BYTES, [("bytes", 1)]),
            Leaf("quant_map", ("F32",), [(16,)]),
            Leaf("absmax", BYTES if nested else ("F32",), [("blocks",)]),
            Leaf(self._state_name, BYTES, [("state bytes",)]),
        )
        reason = " with bnb_4bit_use_double_quant"
        more = (("nested_absmax", "nested blocks"), ("nested_quant_map", 256))
        return (*leaves, *(Leaf(name, ("F32",), [(size,)], reason=reason) for name, size in more if nested))

    def sizes(self, module: str, leaves: Stored) -> Sizes:
        if self.load_in_8bit:
            rows, columns = leaves["weight"].shape
            return {"out": rows, "in": columns}
        stored = leaves[self._state_name]
        if stored.num_bytes > _STATE_BYTES:
            raise ConfigError(f"{self._state_name!r} has {stored.num_bytes} bytes; Ingot reads at most {_STATE_BYTES}")
        state = _read(stored.array())
        rows, columns = state.shape
        blocks = ceil_div(rows * columns, state.blocksize)
        return {
            "out": rows,
            "in": columns,
            "bytes": ceil_div(rows * columns, 2),
            "blocks": blocks,
            "nested blocks": ceil_div(blocks, state.nested_blocksize),
            "state bytes": stored.num_bytes,
        }

    def decode(self, module: str, arrays: Arrays) -> DecodedWeight | FloatArray:
        if self.load_in_4bit:
            return self._decode_4_bits(arrays)
        form, codes = arrays.get("weight_format", np.uint8(0)).item(), arrays["weight"]
        if form != 0:
            raise ValueError(f"weight_format is {form}; Ingot reads 0, rows as they are")
        scales = (arrays["SCB"] / np.float32(127))[:, None]
        return DecodedWeight(codes, scales.astype(np.float32), codes.shape[1], bits=8)

    @property
    def _state_name(self) -> str:
        return f"quant_state.bitsandbytes__{self.bnb_4bit_quant_type}"

    def _decode_4_bits(self, arrays: Arrays) -> FloatArray:
        """[out, in]: no other format has these codes, so none keeps them."""
        state, packed = _read(arrays[self._state_name]), arrays["weight"].reshape(-1)
        count = state.shape[0] * state.shape[1]
        factors = arrays["absmax"]
        if self.bnb_4bit_use_double_quant:
            nested = arrays["nested_absmax"][np.arange(len(factors)) // state.nested_blocksize]
            factors = arrays["nested_quant_map"][factors] * nested + np.float32(state.nested_offset)
        values = np.zeros(len(factors) * state.blocksize, np.float32)
        codes = np.stack([packed >> np.uint8(4), packed & np.uint8(15)], axis=1).reshape(-1)[:count]
        values[:count] = arrays["quant_map"][codes]
        weight: FloatArray = (values.reshape(-1, state.blocksize) * factors[:, None]).reshape(-1)
        return weight[:count].reshape(state.shape)


def _read(state: ByteArray) -> _State:
    """Return the state that a tensor's bytes spell; ConfigError for anything else."""
    try:
        return _State.model_validate(parse_json(state.tobytes()))
    except ValidationError as error:
        raise ConfigError(f"its quant_state: {first_message(error)}") from error
    except ValueError as error:
        raise ConfigError(f"its quant_state is not JSON ({error})") from error
