"""The layout of a block of the KV pool.

    keys, values of layer 0 | keys, values of layer 1 | ...      elements, each run [kv head, token, width]
    scales of the same runs in the same order                    float16 [kv head, token], if the type is quantized

Grouped int4 has a scale and a minimum for each group of dims in place of a vector's one scale.

One block holds all layers, so that moving a block between tiers is one copy. Layers may differ: each size is one number
for all layers, or a list with one for each. A layer that shares another layer's keys and values takes no bytes, and
one with value_dim 0 stores no values, because they are a part of its keys (latent attention). A sequence may also have
side state of fixed size next to its blocks, such as that of recurrent layers.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from hashlib import sha256
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeAlias

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from ingot.artifact.programs.state_parts import PART_BYTES, StateKind, StatePart, check_parts, place_parts
from ingot.errors import BuildError, shown
from ingot.sizes import round_up

ElementType = Literal["float32", "float16", "bfloat16", "fp8", "int8", "int4"]
KVType = Literal["float32", "float16", "bfloat16", "fp8", "int8", "int4", "k8v4"]  # k8v4: keys int8, values int4
KeyOrder = Literal["by-dim", "by-token"]  # order of one head's keys and scales: [width, token] or [token, width]
QUANTIZED: tuple[KVType, ...] = ("fp8", "int8", "int4", "k8v4")  # a vector is stored as codes and scales

_ELEMENT_BYTES: Mapping[KVType, int] = {
    "float32": 4, "float16": 2, "bfloat16": 2, "fp8": 1, "int8": 1, "int4": 1, "k8v4": 1
}  # fmt: skip
MAX_SIZE = 2**16  # size of each axis of a block
MAX_WINDOW = 2**31 - 1  # tokens
MAX_STATE_BYTES = 2**40
SCALE_BYTES = 2
_ALIGNMENT = 16  # bytes, of the scales and of the next block
# Version of the order of runs in a block: increase it when stored blocks can no longer be read.
_LAYOUT_VERSION = 1

Sizes: TypeAlias = int | tuple[int, ...]  # a size for all layers, or one for each


def _sizes(least: int, most: int = MAX_SIZE) -> BeforeValidator:
    """Accept one size, or a list of sizes, with one message for both."""

    def check(value: Any) -> Any:
        sizes = value if isinstance(value, list | tuple) else (value,)
        if not all(type(size) is int and least <= size <= most for size in sizes):
            raise ValueError(
                f"it is {shown(value)}; it must be a whole number from {least} to {most}, or a list of them"
            )
        return tuple(value) if isinstance(value, list) else value

    return BeforeValidator(check)


def key_type(dtype: KVType) -> ElementType:
    """Type of the elements of keys."""
    return "int8" if dtype == "k8v4" else dtype


def value_type(dtype: KVType) -> ElementType:
    """Type of the elements of values."""
    return "int4" if dtype == "k8v4" else dtype


@dataclass(frozen=True, slots=True)
class KVLayer:
    """One layer of a block. Offsets are bytes from the start of the block.

    source          the layer whose keys and values it reads: its own number, unless it shares another's
    window          tokens that a token attends to, itself included; 0: all previous tokens
    value_dim       0 if values are a part of the keys, and not stored
    keys, values    offsets of its vectors [kv head, token, width]
    key_scales, value_scales   offsets of their float16 scales [kv head, token]; unused without scales
    int4_group      dims of int4 that share a scale and a minimum; 0: one scale for the vector
    """

    source: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int
    dtype: KVType
    keys: int
    values: int
    key_scales: int
    value_scales: int
    int4_group: int = 0

    @property
    def key_bytes(self) -> int:
        """Bytes of one key, without its scale."""
        return _vector_bytes(self.key_dim, self.key_type)

    @property
    def value_bytes(self) -> int:
        """Bytes of one value, without its scale; 0 if values are a part of the keys."""
        return _vector_bytes(self.value_dim, self.value_type)

    @property
    def scales_of_key(self) -> int:
        """Numbers in float16 next to the codes of one key: scales, and the minima of grouped int4."""
        return _scales_of(self.key_dim, self.key_type, self.int4_group)

    @property
    def scales_of_value(self) -> int:
        """Numbers in float16 next to the codes of one value."""
        return _scales_of(self.value_dim, self.value_type, self.int4_group)

    @property
    def key_type(self) -> ElementType:
        """Type of the elements of keys."""
        return key_type(self.dtype)

    @property
    def value_type(self) -> ElementType:
        """Type of the elements of values."""
        return value_type(self.dtype)


class BlockRun(NamedTuple):
    """Bytes of a block that a device keeps: from `part` on in its own block, from `whole` on in the model's."""

    part: int
    whole: int
    bytes: int


class KVGeometry(BaseModel):
    """Sizes of one KV block; `layers` has the place of each layer. A uniform model sets the first three fields only.

    num_layers     0 for a device's part without attention; a model has one at least
    num_kv_heads   this and the sizes below: one for all layers, or a list with one for each
    head_dim       dims of a key
    value_dim      dims of a value; None: those of a key; 0: values are a part of the keys, and not stored
    window         tokens that a token attends to, itself included; 0: all previous tokens
    shares         for each layer, the layer whose keys and values it reads: an earlier one, or itself; (): all itself
    block_tokens   tokens of a block
    dtype          type of the stored elements
    int4_group     dims of int4 that share a scale and a minimum; 0: one scale for a vector, no minimum
    state_bytes    bytes of a sequence's side state; 0 for none
    state          its parts: which recurrent layer has which bytes
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_layers: int = Field(ge=0, le=MAX_SIZE)
    num_kv_heads: Annotated[Sizes, _sizes(1)]
    head_dim: Annotated[Sizes, _sizes(1)]
    value_dim: Annotated[Sizes | None, _sizes(0)] = None
    window: Annotated[Sizes, _sizes(0, MAX_WINDOW)] = 0
    shares: tuple[Annotated[int, Field(ge=0, lt=MAX_SIZE)], ...] = ()
    block_tokens: int = Field(default=16, ge=1, le=MAX_SIZE)
    dtype: KVType = "float32"
    int4_group: int = Field(default=0, ge=0, le=MAX_SIZE)
    state_bytes: int = Field(default=0, ge=0, le=MAX_STATE_BYTES)
    state: tuple[StatePart, ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        """Check the lists, and write what is equal in all layers as one number: equal layouts are equal values."""
        columns = _columns(self)
        _check_sharing(columns)
        _check_whole_bytes(columns, self.dtype)
        _check_group(self)
        check_parts(self.state, self.state_bytes)
        self.__dict__.update(_shortest(columns))
        return self

    @model_serializer(mode="wrap")
    def _without_defaults(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what a uniform model does not need: a newer Ingot computes the same identity as an older one."""
        values: dict[str, Any] = serialize(self)
        unset = {name for name in _OPTIONAL if getattr(self, name) == type(self).model_fields[name].default}
        return {name: value for name, value in values.items() if name not in unset}

    @property
    def layers(self) -> tuple[KVLayer, ...]:
        """Every layer with its place in a block."""
        return _layout(self).layers

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: keys, values and scales of all layers."""
        return _layout(self).block_bytes

    @property
    def code_bytes(self) -> int:
        """Bytes of a block's elements, padded if scales follow them."""
        return _layout(self).code_bytes

    @property
    def is_quantized(self) -> bool:
        """Whether vectors are stored as codes with a scale."""
        return self.dtype in QUANTIZED

    @property
    def type_in_words(self) -> str:
        """The type, and the size of its groups if it has any."""
        return f"{self.dtype} in groups of {self.int4_group}" if self.int4_group else self.dtype

    @property
    def element_bytes(self) -> int:
        """Bytes of an element; an element of int4 is a byte of two dims."""
        return _ELEMENT_BYTES[self.dtype]

    def format_digest(self, key_order: KeyOrder) -> str:
        """SHA-256 of all that decides how the bytes of a block and of side state are read.

        key_order   of the engine that fills the pool: the geometry places a head's keys, and not the elements of each
        """
        layers = [asdict(layer) for layer in self.layers]
        facts = [_LAYOUT_VERSION, key_order, self.block_tokens, self.dtype, self.block_bytes, self.state_bytes, layers]
        facts += [[part.model_dump() for part in self.state]] if self.state else []
        return sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def keys_offset(self, layer: int) -> int:
        """Bytes from the start of a block to the keys [kv head, token, width] that a layer reads."""
        return self.layers[layer].keys

    def values_offset(self, layer: int) -> int:
        """Bytes from the start of a block to the values that a layer reads; to its keys if they contain the values."""
        return self.layers[layer].values

    def key_scales_offset(self, layer: int) -> int:
        """Bytes from the start of a block to the float16 scales [kv head, token] of a layer's keys."""
        return self.layers[layer].key_scales

    def value_scales_offset(self, layer: int) -> int:
        """Bytes from the start of a block to the float16 scales [kv head, token] of a layer's values."""
        return self.layers[layer].value_scales

    def pool_offset(self, layer: int) -> int:
        """Elements from the start of a block to the keys that a layer reads."""
        return self.keys_offset(layer) // self.element_bytes

    def scale_offset(self, layer: int) -> int:
        """float16 elements from the start of a block to the scales of the keys that a layer reads."""
        return self.key_scales_offset(layer) // SCALE_BYTES

    def vector_elements(self, layer: int) -> int:
        """Elements of one key of a layer; an element of int4 is two dims."""
        return self.layers[layer].key_bytes // self.element_bytes

    def strides(self, layer: int) -> dict[str, int]:
        """Strides of a layer's vectors by kernel argument, in elements; those of scales in float16 elements.

        BuildError for groups of int4, which have more scales than the kernels read.
        """
        if self.int4_group:
            raise BuildError(
                f"the model has {self.type_in_words} dims; a GPU's attention kernel needs one scale for a vector: set "
                "passes.quantize-kv-cache.group to 0"
            )
        found = self.layers[layer]
        return {
            "block_stride": self.block_bytes // self.element_bytes,
            "head_stride": self.block_tokens * self.vector_elements(layer),
            "value_offset": (found.values - found.keys) // self.element_bytes,
            "scale_block_stride": self.block_bytes // SCALE_BYTES,
            "scale_value_offset": (found.value_scales - found.key_scales) // SCALE_BYTES,
        }

    def part(self, layers: Sequence[int], states: Collection[tuple[int, StateKind]] = ()) -> "KVGeometry":
        """Return the geometry of a pool that keeps these layers alone, and these states of recurrent layers.

        The layers are in ascending order, and share keys and values with each other only.
        """
        columns = _columns(self)
        own = [tuple(sizes[layer] for layer in layers) for sizes in columns]
        sizes = dict(zip(_Columns._fields, own, strict=True))
        shares = tuple(layers.index(source) for source in sizes["shares"])
        state = place_parts(part for part in self.state if (part.layer, part.kind) in states)
        rest = {"block_tokens": self.block_tokens, "dtype": self.dtype, "int4_group": self.int4_group}
        return KVGeometry.model_validate(
            {
                **rest,
                **sizes,
                "num_layers": len(layers),
                "shares": shares,
                "state": state,
                "state_bytes": round_up(state[-1].end, PART_BYTES) if state else 0,
            }
        )

    def block_runs(self, part: "KVGeometry", layers: Sequence[int]) -> tuple[BlockRun, ...]:
        """Return where the bytes of a part's block are in a block of all layers; `part` is that of these layers."""
        pairs = [(part.layers[at], self.layers[layer]) for at, layer in enumerate(layers)]
        owners = [pair for at, pair in enumerate(pairs) if pair[0].source == at]
        of_codes = (BlockRun(own.keys, all_.keys, self._code_bytes(all_)) for own, all_ in owners)
        of_scales = (BlockRun(own.key_scales, all_.key_scales, self._scale_bytes(all_)) for own, all_ in owners)
        return tuple(_joined((*of_codes, *of_scales)))

    def state_runs(self, part: "KVGeometry") -> tuple[BlockRun, ...]:
        """Return where the bytes of a part's side state are in the side state of all layers."""
        places = {(one.layer, one.kind): one.offset for one in self.state}
        return tuple(_joined(BlockRun(one.offset, places[one.layer, one.kind], one.bytes) for one in part.state))

    def _code_bytes(self, layer: KVLayer) -> int:
        return layer.num_kv_heads * self.block_tokens * (layer.key_bytes + layer.value_bytes)

    def _scale_bytes(self, layer: KVLayer) -> int:
        return layer.num_kv_heads * self.block_tokens * (layer.scales_of_key + layer.scales_of_value) * SCALE_BYTES

    # The rest is for readers of layers of one shape.

    @property
    def unequal(self) -> str | None:
        """The reason why readers of layers of one shape cannot read these layers, or None."""
        found = [name for name in ("num_kv_heads", "head_dim") if isinstance(getattr(self, name), tuple)]
        words = [f"layers of different {name}" for name in found]
        others = "latent keys" if self.value_dim == 0 else "values of other dims than keys"
        words += [others] if self.value_dim is not None else []
        words += ["layers that share keys and values"] if self.shares else []
        words += [f"int4 in groups of {self.int4_group} dims"] if self.int4_group else []
        return ", ".join(words) or None

    def uniform(self, reader: str) -> KVLayer:
        """Layer 0, which has the shape of all. BuildError, which names the reader, if layers differ."""
        if self.unequal:
            raise BuildError(
                f"the model has {self.unequal}; {reader} needs the same heads and dims in all layers: choose a target"
                " that supports it"
            )
        return self.layers[0]

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """[layers, 2, kv heads, block tokens, elements of a vector], of layers of one shape."""
        heads = self.uniform("a block as one array").num_kv_heads
        return (self.num_layers, 2, heads, self.block_tokens, self.width)

    @property
    def width(self) -> int:
        """Elements of one vector, of layers of one shape."""
        return self.uniform("a kernel").key_bytes // self.element_bytes


# Fields that a manifest may leave out.
_OPTIONAL = ("value_dim", "window", "shares", "int4_group", "state_bytes", "state")


class _Columns(NamedTuple):
    """A geometry's sizes with one entry for each layer."""

    num_kv_heads: tuple[int, ...]
    head_dim: tuple[int, ...]
    value_dim: tuple[int, ...]
    window: tuple[int, ...]
    shares: tuple[int, ...]


class _Layout(NamedTuple):
    layers: tuple[KVLayer, ...]
    code_bytes: int
    block_bytes: int


def _joined(runs: Iterable[BlockRun]) -> Iterator[BlockRun]:
    """The runs without empty ones, neighbours as one."""
    last: BlockRun | None = None
    for run in runs:
        if last is not None and (last.part + last.bytes, last.whole + last.bytes) == (run.part, run.whole):
            last = last._replace(bytes=last.bytes + run.bytes)
            continue
        if last is not None and last.bytes:
            yield last
        last = run
    if last is not None and last.bytes:
        yield last


def _columns(geometry: KVGeometry) -> _Columns:
    """ValueError for a list that has not one entry for each layer."""
    count = geometry.num_layers

    def column(name: str, sizes: Sizes) -> tuple[int, ...]:
        if isinstance(sizes, int):
            return (sizes,) * count
        if len(sizes) != count:
            raise ValueError(f"{name} has {len(sizes)} entries; it needs one for each of the {count} layers")
        return sizes

    value_dim = geometry.head_dim if geometry.value_dim is None else geometry.value_dim
    return _Columns(
        column("num_kv_heads", geometry.num_kv_heads),
        column("head_dim", geometry.head_dim),
        column("value_dim", value_dim),
        column("window", geometry.window),
        column("shares", geometry.shares or tuple(range(count))),
    )


def _check_sharing(columns: _Columns) -> None:
    """Raise ValueError for a layer that shares a later one, one without keys and values, or one of another shape."""
    shapes = list(zip(*columns[:3], strict=True))
    for layer, source in enumerate(columns.shares):
        if source > layer:
            raise ValueError(f"shares: layer {layer} shares layer {source}; a layer may share an earlier one only")
        if columns.shares[source] != source:
            raise ValueError(
                f"shares: layer {layer} shares layer {source}, which has no keys and values of its own;"
                f" name layer {columns.shares[source]}"
            )
        if shapes[layer] != shapes[source]:
            raise ValueError(
                f"shares: layer {layer} has heads, key dims, value dims {shapes[layer]}, and layer {source}, which it"
                f" shares, {shapes[source]}; they must be equal"
            )


def _check_whole_bytes(columns: _Columns, dtype: KVType) -> None:
    for name, kind in (("head_dim", key_type(dtype)), ("value_dim", value_type(dtype))):
        odd = next((size for size in getattr(columns, name) if size % 2), None)
        if kind == "int4" and odd is not None:
            raise ValueError(f"{name} is {odd}; int4 stores two dims in a byte, so it must be even")


def _check_group(geometry: KVGeometry) -> None:
    if geometry.int4_group and value_type(geometry.dtype) != "int4":
        raise ValueError(f"int4_group is {geometry.int4_group}; with {geometry.dtype} it must be 0")
    if geometry.int4_group % 2:
        raise ValueError(f"int4_group is {geometry.int4_group}; int4 stores two dims in a byte, so it must be even")


def _shortest(columns: _Columns) -> dict[str, object]:
    """The fields that give these columns, in the shortest way."""
    fields: dict[str, object] = {
        name: sizes[0] if len(set(sizes)) == 1 else sizes for name, sizes in columns._asdict().items()
    }
    if columns.value_dim == columns.head_dim:
        fields["value_dim"] = None
    fields["shares"] = () if columns.shares == tuple(range(len(columns.shares))) else columns.shares
    return fields


@lru_cache(maxsize=64)
def _layout(geometry: KVGeometry) -> _Layout:
    """Place the runs of all layers: first the elements of each, then the scales of each."""
    columns, dtype = _columns(geometry), geometry.dtype
    code_bytes = sum(_run_bytes(geometry, columns, layer) for layer in range(geometry.num_layers))
    if geometry.is_quantized:
        code_bytes = round_up(code_bytes, _ALIGNMENT)
    made: list[KVLayer] = []
    at, scale = 0, code_bytes
    for layer, (heads, key_dim, value_dim, window, source) in enumerate(zip(*columns, strict=True)):
        if source != layer:
            made.append(replace(made[source], window=window))
            continue
        vectors, group = heads * geometry.block_tokens, geometry.int4_group
        values = at + vectors * _vector_bytes(key_dim, key_type(dtype)) if value_dim else at
        of_key = _scales_of(key_dim, key_type(dtype), group) * SCALE_BYTES
        of_value = _scales_of(value_dim, value_type(dtype), group) * SCALE_BYTES
        value_scales = scale + vectors * of_key if value_dim else scale
        made.append(KVLayer(source, heads, key_dim, value_dim, window, dtype, at, values, scale, value_scales, group))
        at += _run_bytes(geometry, columns, layer)
        scale += vectors * (of_key + of_value)
    return _Layout(tuple(made), code_bytes, round_up(scale, _ALIGNMENT) if geometry.is_quantized else at)


def _run_bytes(geometry: KVGeometry, columns: _Columns, layer: int) -> int:
    """Bytes of a layer's own keys and values; 0 if it shares another's."""
    if columns.shares[layer] != layer:
        return 0
    key_bytes = _vector_bytes(columns.head_dim[layer], key_type(geometry.dtype))
    value_bytes = _vector_bytes(columns.value_dim[layer], value_type(geometry.dtype))
    return columns.num_kv_heads[layer] * geometry.block_tokens * (key_bytes + value_bytes)


def _scales_of(dims: int, dtype: ElementType, int4_group: int) -> int:
    """Numbers in float16 next to a vector's codes."""
    if dtype not in QUANTIZED or dims == 0:
        return 0
    return 2 * -(-dims // int4_group) if dtype == "int4" and int4_group else 1


def _vector_bytes(dims: int, dtype: ElementType) -> int:
    return dims // 2 if dtype == "int4" else dims * _ELEMENT_BYTES[dtype]
