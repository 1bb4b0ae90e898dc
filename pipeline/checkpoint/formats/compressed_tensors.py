"""compressed-tensors (llm-compressor): one decoder for each storage format of a layer's weight.

    pack-quantized         weight_packed int32 [out, words]     LSB-first stream along `in`, code + 2 ** (bits - 1)
                           weight_zero_point int32 [words, groups], packed likewise along `out`; symmetric: absent
                           weight_g_idx [in] with actorder "group"
    int-quantized          weight int8 [out, in]                weight_zero_point int8 as weight_scale, or absent
    float-quantized        weight float8_e4m3 [out, in]
    nvfp4-pack-quantized   weight_packed uint8 [out, in / 2]    e2m1, low half first; weight_scale e4m3 [out, in / 16],
                                                                divided by weight_global_scale [1]
    mxfp4-pack-quantized   weight_packed as above               weight_scale uint8 e8m0 [out, in / 32]

weight_scale is [1] per tensor, [out, 1] per channel, [out, groups] per group, [out / rows, in / columns] per block.
Stored fp8 tensors come as their bytes (uint8). (Source: compressed_tensors/compressors/quantized_compressors.)
"""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, field_validator, model_validator
from pydantic_core import PydanticCustomError

from ingot.errors import ConfigError, shown
from ingot.pipeline.checkpoint.formats.activations import CONTRADICTION, InputActivations, InputScheme
from ingot.pipeline.checkpoint.formats.codes import (
    num_words,
)
from ingot.pipeline.checkpoint.formats.compressed_weights import decode
from ingot.pipeline.checkpoint.formats.decoded import DecodedWeight, load
from ingot.pipeline.checkpoint.formats.leaves import (
    BYTES,
    FLOATS,
    FP8,
    INDICES,
    PACKED,
    SCALAR,
    Leaf,
    Shape,
    Sizes,
    Stored,
)
from ingot.pipeline.checkpoint.formats.quant_method import (
    Arrays,
    GroupSize,
    QuantMethod,
    Settings,
    num_groups,
    readable,
    unsupported,
)
from ingot.sizes import ceil_div

FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
)
_ASYMMETRIC = " because symmetric is false"
PACKED_BITS = (2, 3, 4, 5, 6, 7, 8)


def _dense(value: Any) -> Any:
    if value and value.get("format", "dense") != "dense":
        raise ValueError("Ingot reads no sparse formats, only 'dense'")
    return value


class _WeightSettings(Settings):
    """config_groups.NAME.weights."""

    num_bits: int
    type: Literal["int", "float"] | None = None
    symmetric: bool = True
    strategy: Literal["tensor", "channel", "group", "block", "tensor_group"] | None = None
    group_size: GroupSize | None = None
    block_structure: Any = None
    actorder: Any = None


class ConfigGroup(Settings):
    """One of config_groups: the layers that share a scheme."""

    format: Annotated[str, readable(FORMATS)]
    targets: list[str]
    weights: _WeightSettings
    input_activations: InputActivations | None = None

    @model_validator(mode="after")
    def _readable_widths(self) -> Self:
        bits, eight = self.weights.num_bits, ("int-quantized", "float-quantized", "naive-quantized")
        if self.format == "pack-quantized" and bits not in PACKED_BITS:
            raise PydanticCustomError(CONTRADICTION, f"num_bits is {bits}; pack-quantized is read with 2 to 8 bits")
        if self.format in eight and bits != 8:
            raise PydanticCustomError(CONTRADICTION, f"num_bits is {bits}; {self.format} is read with 8 bits")
        return self

    @model_validator(mode="after")
    def _readable_block(self) -> Self:
        match self.weights.strategy, self.weights.block_structure:
            case "block", [int(rows), int(columns)] if rows > 0 and columns > 0:
                return self
            case "block", value:
                raise PydanticCustomError(
                    CONTRADICTION, f"block_structure is {shown(value)}; it must be [rows, columns]"
                )
        return self

    @property
    def is_packed(self) -> bool:
        """Whether several codes share a stored number."""
        return "pack" in self.format

    @property
    def has_order(self) -> bool:
        """Whether every layer stores the groups of its columns."""
        return self.weights.actorder in (True, "group", "dynamic")

    @property
    def code_types(self) -> Sequence[str]:
        """Types of the stored codes."""
        match self.format:
            case "int-quantized":
                return ("I8",)
            case "float-quantized":
                return FP8
            case "naive-quantized":
                return {"int": ("I8",), "float": FP8, None: ("I8", *FP8)}[self.weights.type]
        return PACKED if self.format == "pack-quantized" else BYTES

    @property
    def group_size(self) -> int | None:
        """Columns that share a scale; None when config.json leaves it to the shape of the scales."""
        return self.weights.group_size if self.weights.strategy == "group" else None

    @property
    def block(self) -> tuple[int, int] | None:
        """Rows and columns that share a scale."""
        if self.weights.strategy != "block":
            return None
        rows, columns = self.weights.block_structure
        return rows, columns

    @property
    def names_modules(self) -> bool:
        """Whether the targets are names of modules, which come before the class Linear."""
        return "Linear" not in self.targets

    def covers(self, module: str) -> bool:
        """Return whether a target matches: the class (every layer is Linear), a regular expression, or the name."""
        return any(
            re.match(target.removeprefix("re:"), module) if target.startswith("re:") else target in ("Linear", module)
            for target in self.targets
        )


class CompressedTensors(QuantMethod):
    """quant_method compressed-tensors: a scheme for each group of layers."""

    title = "compressed-tensors"

    config_groups: dict[str, ConfigGroup]
    transform_config: Annotated[Any, unsupported("transforms that run with the model are not supported")] = None
    sparsity_config: Annotated[dict[str, Any] | None, AfterValidator(_dense)] = None

    @model_validator(mode="before")
    @classmethod
    def _share_format(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Give the model's format to the groups without their own."""
        match values.get("config_groups"):
            case dict(groups):
                shared = {
                    name: {**group, "format": group.get("format") or values.get("format")}
                    if isinstance(group, dict)
                    else group
                    for name, group in groups.items()
                }
                return {**values, "config_groups": shared}
        return values

    @field_validator("config_groups")
    @classmethod
    def _at_least_one(cls, groups: dict[str, ConfigGroup]) -> dict[str, ConfigGroup]:
        if not groups:
            raise ValueError("it must hold at least one group")
        return groups

    def table(self, module: str) -> Sequence[Leaf]:
        group = self._group(module)
        codes = Leaf("weight_packed" if group.is_packed else "weight", group.code_types, [("out", "stored columns")])
        match group.format:
            case "nvfp4-pack-quantized":
                second = Leaf("weight_global_scale", FLOATS, SCALAR)
                return (codes, Leaf("weight_scale", FP8, [("out", "groups")]), second)
            case "mxfp4-pack-quantized":
                return (codes, Leaf("weight_scale", BYTES, [("out", "groups")]))
        shapes = _scale_shapes(group.weights.strategy)
        scale, has_zeros = Leaf("weight_scale", FLOATS, shapes), not group.weights.symmetric
        if group.format == "pack-quantized":
            zeros = Leaf("weight_zero_point", PACKED, [("out words", "groups")], has_zeros, _ASYMMETRIC)
            order = Leaf(
                "weight_g_idx", INDICES, [("in",)], group.has_order, f" because actorder is {group.weights.actorder!r}"
            )
            return (codes, scale, Leaf("weight_shape", INDICES, [(2,)]), zeros, order)
        return (codes, scale, Leaf("weight_zero_point", group.code_types, shapes, has_zeros, _ASYMMETRIC))

    def sizes(self, module: str, leaves: Stored) -> Sizes:
        group = self._group(module)
        stored = leaves["weight_packed" if group.is_packed else "weight"].shape
        rows, columns = _shape(leaves, stored, is_packed=group.is_packed)
        sizes = {"out": rows, "in": columns, "stored columns": stored[1] if group.format != "pack-quantized" else 0}
        if group.format == "pack-quantized":
            bits = group.weights.num_bits
            sizes |= {"stored columns": num_words(columns, bits), "out words": num_words(rows, bits)}
        if group.block is not None:
            sizes |= {"block rows": ceil_div(rows, group.block[0]), "block columns": ceil_div(columns, group.block[1])}
        return {**sizes, "groups": _num_groups(group, columns, leaves["weight_scale"].shape)}

    def decode(self, module: str, arrays: Arrays) -> DecodedWeight:
        group = self._group(module)
        bits, size, block = group.weights.num_bits, group.group_size, group.block
        return decode(arrays, group.format, bits=bits, group_size=size, block=block)

    def storage_of(self, module: str) -> str:
        return self._group(module).format

    def activations_of(self, module: str) -> InputScheme | None:
        inputs = self._group(module).input_activations
        return inputs.scheme if inputs else None

    def _group(self, module: str) -> ConfigGroup:
        groups = sorted(self.config_groups.values(), key=lambda group: not group.names_modules)
        group = next((group for group in groups if group.covers(module)), None)
        if group is None:
            raise ValueError("is quantized, but no config group targets it")
        return group


def _scale_shapes(strategy: str | None) -> Sequence[Shape]:
    """Return the shapes that scales may have; any of them where config.json leaves it open."""
    one: Sequence[Shape] = (*SCALAR, (1, 1))
    rows: Sequence[Shape] = [("out", 1), ("out",)]
    match strategy:
        case "tensor":
            return one
        case "channel":
            return rows
        case "block":
            return [("block rows", "block columns")]
        case None:
            return [("out", "groups"), ("out",), *one]
    return [("out", "groups")]


def _shape(leaves: Stored, stored: tuple[int, ...], *, is_packed: bool) -> tuple[int, int]:
    """Return [out, in] of the weight, from weight_shape or from that of its codes."""
    if "weight_shape" not in leaves:
        return stored[0], stored[1] * 2 if is_packed else stored[1]
    if leaves["weight_shape"].shape != (2,):
        raise ConfigError(f"'weight_shape' has the shape {list(leaves['weight_shape'].shape)}; it must be [2]")
    rows, columns = (int(size) for size in load(leaves["weight_shape"]))
    if rows < 1 or columns < 1:
        raise ConfigError(f"'weight_shape' holds {[rows, columns]}; it must hold two numbers from 1")
    return rows, columns


def _num_groups(group: ConfigGroup, columns: int, scale: tuple[int, ...]) -> int:
    """Return the groups of a row; where config.json does not give their size, those of weight_scale."""
    width = {"nvfp4-pack-quantized": 16, "mxfp4-pack-quantized": 32}.get(group.format) or group.group_size
    if width is not None:
        return num_groups(columns, width)
    count = scale[1] if len(scale) == 2 else 1
    if count < 1 or columns % count:
        raise ConfigError(f"'weight_scale' has the shape {list(scale)}, which does not divide {columns} columns")
    return count
