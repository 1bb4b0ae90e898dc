"""The layout of a KV block: sizes, offsets and strides, with and without scales, of equal and unequal layers."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from ingot.artifact import KVGeometry
from ingot.artifact.kv_geometry import KVType
from ingot.errors import BuildError
from tests.each_case import each_case


def geometry(dtype: KVType = "float32") -> KVGeometry:
    return KVGeometry(num_layers=3, num_kv_heads=2, head_dim=8, block_tokens=5, dtype=dtype)


VECTORS = 3 * 2 * 2 * 5  # layers, keys and values, heads, tokens


@pytest.mark.parametrize(
    ("dtype", "code_bytes", "scale_bytes"),
    [
        ("float32", VECTORS * 8 * 4, 0),
        ("bfloat16", VECTORS * 8 * 2, 0),
        ("fp8", VECTORS * 8, 128),  # 60 float16 scales take 120 bytes, padded to 128
        ("int4", VECTORS * 4, 128),
    ],
)
def test_a_block_has_the_bytes_of_its_vectors_and_padded_scales(
    dtype: KVType, code_bytes: int, scale_bytes: int
) -> None:
    made = geometry(dtype)
    assert (made.code_bytes, made.block_bytes) == (code_bytes, code_bytes + scale_bytes)
    assert made.is_quantized == (scale_bytes > 0)


@pytest.mark.parametrize("dtype", ["float32", "int4"])
def test_offsets_and_strides_are_those_of_an_array_of_the_blocks_shape(dtype: KVType) -> None:
    made = geometry(dtype)
    block = np.zeros(made.block_shape)
    strides = [stride // block.itemsize for stride in block.strides]
    assert [made.pool_offset(layer) for layer in range(3)] == [layer * strides[0] for layer in range(3)]
    named = made.strides(1)
    assert (named["value_offset"], named["head_stride"]) == (strides[1], strides[2])
    assert named["block_stride"] * made.element_bytes == made.block_bytes


def test_scales_follow_the_codes_in_the_same_order() -> None:
    made = geometry("int8")
    scales = np.zeros(made.block_shape[:-1])
    strides = [stride // scales.itemsize for stride in scales.strides]
    assert [2 * made.scale_offset(layer) for layer in range(3)] == [
        made.code_bytes + 2 * layer * strides[0] for layer in range(3)
    ]
    assert made.strides(1)["scale_value_offset"] == strides[1]
    assert 2 * made.strides(1)["scale_block_stride"] == made.block_bytes


@pytest.mark.parametrize("dtype", ["float16", "int8", "int4"])
def test_strides_of_unequal_layers_lead_to_their_keys_values_and_scales(dtype: KVType) -> None:
    shapes = {"num_layers": 4, "num_kv_heads": [2, 1, 2, 1], "head_dim": [8, 16, 8, 16], "shares": [0, 1, 0, 1]}
    made = KVGeometry.model_validate({**shapes, "block_tokens": 4, "dtype": dtype})
    taken = np.zeros(made.block_bytes, int)
    for number, (heads, dim) in enumerate([(2, 8), (1, 16)]):
        named, width, size = made.strides(number), made.vector_elements(number), made.element_bytes
        assert width * size == KVGeometry(num_layers=1, num_kv_heads=1, head_dim=dim, dtype=dtype).layers[0].key_bytes
        assert made.strides(number + 2) == named
        assert made.pool_offset(number + 2) == made.pool_offset(number)
        for begin in (0, named["value_offset"]):
            for head in range(heads):
                at = (made.pool_offset(number) + begin + head * named["head_stride"]) * size
                taken[at : at + 4 * width * size] += 1
        for begin in (0, named["scale_value_offset"]) if made.is_quantized else ():
            at = 2 * (made.scale_offset(number) + begin)
            taken[at : at + 2 * heads * 4] += 1
    assert taken.max() == 1
    assert taken.sum() == made.block_bytes - (made.is_quantized and (-taken.sum()) % 16)


def test_latent_keys_have_no_values_of_their_own() -> None:
    made = KVGeometry(num_layers=2, num_kv_heads=1, head_dim=24, value_dim=0, dtype="int8")
    named = made.strides(1)
    assert (named["value_offset"], named["scale_value_offset"], named["head_stride"]) == (0, 0, 16 * 24)


@each_case(
    ("dtype", "group", "of_key", "of_value"),
    [
        ("float16", 0, 0, 0),
        ("int8", 0, 1, 1),
        ("int4", 0, 1, 1),
        ("int4", 32, 6, 6),
        ("k8v4", 32, 1, 6),
        ("int4", 128, 2, 2),
    ],
)
def test_a_group_of_int4_has_a_scale_and_a_minimum(dtype: KVType, group: int, of_key: int, of_value: int) -> None:
    made = KVGeometry(num_layers=2, num_kv_heads=2, head_dim=80, dtype=dtype, int4_group=group)
    assert [(layer.scales_of_key, layer.scales_of_value) for layer in made.layers] == [(of_key, of_value)] * 2
    assert made.block_bytes - made.code_bytes == 2 * 2 * 16 * 2 * (of_key + of_value)
    assert KVGeometry.model_validate_json(made.model_dump_json()) == made


def test_kernels_for_one_scale_a_vector_refuse_groups_by_name() -> None:
    made = KVGeometry(num_layers=2, num_kv_heads=2, head_dim=64, dtype="int4", int4_group=32)
    with pytest.raises(BuildError, match="the model has int4 in groups of 32 dims; a GPU's attention kernel needs"):
        made.strides(0)
    assert made.type_in_words == "int4 in groups of 32"


@pytest.mark.parametrize("change", [{"num_layers": -1}, {"head_dim": -8}, {"dtype": "int3"}, {"layout": "rows"}])
def test_impossible_sizes_unknown_types_and_unknown_fields_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=next(iter(change))):
        KVGeometry.model_validate({"num_layers": 3, "num_kv_heads": 2, "head_dim": 8, **change})


UNEQUAL = {  # a full layer, two with windows of other sizes, the last of which shares the second's, and a latent one
    "num_layers": 4,
    "num_kv_heads": [2, 1, 1, 1],
    "head_dim": [8, 4, 4, 12],
    "value_dim": [8, 4, 4, 0],
    "window": [0, 6, 6, 0],
    "shares": [0, 1, 1, 3],
    "block_tokens": 5,
}


@st.composite
def geometries(draw: st.DrawFn) -> KVGeometry:
    count = draw(st.integers(1, 6))

    def column(sizes: st.SearchStrategy[int]) -> list[int]:
        return draw(st.lists(sizes, min_size=count, max_size=count))

    columns = {
        "num_kv_heads": column(st.integers(1, 3)),
        "head_dim": column(st.sampled_from([2, 4, 6, 32])),
        "value_dim": column(st.sampled_from([0, 2, 8, 32])),
        "window": column(st.integers(0, 20)),
    }
    shares = list(range(count))
    for layer in range(count):
        source = draw(st.integers(0, layer))
        if shares[source] == source and draw(st.booleans()):
            shares[layer] = source
            for name in ("num_kv_heads", "head_dim", "value_dim"):
                columns[name][layer] = columns[name][source]
    dtype = draw(st.sampled_from(["float32", "float16", "fp8", "int4"]))
    tokens, state = draw(st.integers(1, 17)), draw(st.sampled_from([0, 24]))
    group = draw(st.sampled_from([0, 6, 16])) if dtype == "int4" else 0
    fields = {**columns, "shares": shares, "block_tokens": tokens, "dtype": dtype, "state_bytes": state}
    fields["int4_group"] = group
    return KVGeometry.model_validate({"num_layers": count, **fields})


def runs(made: KVGeometry) -> list[tuple[int, int]]:
    """Start and end of every run of elements and scales that a layer owns."""
    found = []
    for number, layer in enumerate(made.layers):
        if layer.source == number:
            vectors = layer.num_kv_heads * made.block_tokens
            found.append((layer.keys, vectors * layer.key_bytes))
            found.append((layer.values, vectors * layer.value_bytes))
            if made.is_quantized:
                found.append((layer.key_scales, 2 * vectors * layer.scales_of_key))
                found.append((layer.value_scales, 2 * vectors * layer.scales_of_value))
    return sorted((start, start + size) for start, size in found if size)


@given(geometries())
def test_runs_fill_a_block_without_overlap_and_scales_are_aligned(made: KVGeometry) -> None:
    at = 0
    for start, end in runs(made):
        if start != at:  # the only gap: elements are padded before the scales
            assert start == made.code_bytes
            assert 0 < start - at < 16
        at = end
    assert 0 <= made.block_bytes - at < (16 if made.is_quantized else 1)
    assert all(start % made.element_bytes == 0 for start, _ in runs(made))
    if made.is_quantized:
        assert made.code_bytes % 16 == made.block_bytes % 16 == 0


@given(geometries())
def test_a_layer_that_shares_reads_where_its_source_does_and_latent_values_are_at_the_keys(made: KVGeometry) -> None:
    for number, layer in enumerate(made.layers):
        places = [
            (made.keys_offset(n), made.values_offset(n), made.key_scales_offset(n), made.value_scales_offset(n))
            for n in (number, layer.source)
        ]
        assert places[0] == places[1]
        if layer.value_dim == 0:
            assert (layer.values, layer.value_scales, layer.value_bytes) == (layer.keys, layer.key_scales, 0)


@given(geometries())
def test_a_geometry_survives_json_and_equal_layouts_are_equal_values(made: KVGeometry) -> None:
    text = made.model_dump_json()
    assert KVGeometry.model_validate_json(text, strict=True) == made
    assert json.loads(text) == json.loads(json.dumps(made.model_dump(mode="json")))
    spelled_out: dict[str, Any] = {
        "num_kv_heads": [layer.num_kv_heads for layer in made.layers],
        "head_dim": [layer.key_dim for layer in made.layers],
        "value_dim": [layer.value_dim for layer in made.layers],
        "window": [layer.window for layer in made.layers],
        "shares": [layer.source for layer in made.layers],
    }
    again = KVGeometry.model_validate({**json.loads(text), **spelled_out})
    assert again == made
    assert hash(again) == hash(made)
    assert again.format_digest("by-dim") == made.format_digest("by-dim")


def test_a_uniform_model_has_the_json_of_before_there_were_layers() -> None:
    text = '{"num_layers":3,"num_kv_heads":2,"head_dim":8,"block_tokens":5,"dtype":"float32"}'
    assert geometry().model_dump_json() == text
    lists = {"num_layers": 3, "num_kv_heads": [2, 2, 2], "head_dim": [8, 8, 8], "value_dim": 8, "block_tokens": 5}
    assert KVGeometry.model_validate({**lists, "shares": [0, 1, 2], "window": [0, 0, 0]}).model_dump_json() == text


@each_case(
    "change",
    [
        {"num_kv_heads": 4},
        {"head_dim": 4},
        {"value_dim": 0},
        {"shares": (0, 0, 2)},
        {"block_tokens": 10},
        {"dtype": "float16"},
        {"state_bytes": 8},
        {"window": 3},
        {"int4_group": 4},
        {"int4_group": 2},
    ],
)
def test_the_format_digest_covers_every_field(change: dict[str, object]) -> None:
    before = geometry("int4" if "int4_group" in change else "float32")
    after = KVGeometry.model_validate({**before.model_dump(), **change})
    assert before.format_digest("by-dim") != after.format_digest("by-dim")


def test_the_format_digest_tells_the_orders_of_keys_apart() -> None:
    assert geometry().format_digest("by-dim") != geometry().format_digest("by-token")


@each_case(
    ("change", "message"),
    [
        ({"head_dim": [8, 4]}, "head_dim has 2 entries; it needs one for each of the 4 layers"),
        ({"shares": [0, 1]}, "shares has 2 entries; it needs one for each of the 4 layers"),
        ({"window": []}, "window has 0 entries"),
        (
            {"head_dim": [8, 4, 4, True]},
            r"it is \[8, 4, 4, True\]; it must be a whole number from 1 to 65536, or a list",
        ),
        ({"window": -1}, "it is -1; it must be a whole number from 0"),
        ({"shares": [0, 2, 2, 3]}, "layer 1 shares layer 2; a layer may share an earlier one only"),
        ({"shares": [0, 1, 1, 2]}, "layer 3 shares layer 2, which has no keys and values of its own; name layer 1"),
        ({"shares": [0, 1, 0, 3]}, r"layer 2 has heads, key dims, value dims \(1, 4, 4\), and layer 0, .* \(2, 8, 8\)"),
        ({"value_dim": [8, 4, 4, 7], "dtype": "int4"}, "value_dim is 7; int4 stores two dims in a byte"),
        ({"int4_group": 32}, "int4_group is 32; with float32 it must be 0"),
        ({"int4_group": 3, "dtype": "int4"}, "int4_group is 3; int4 stores two dims in a byte"),
        ({"state_bytes": -1}, "state_bytes"),
    ],
)
def test_inconsistent_layers_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        KVGeometry.model_validate({**UNEQUAL, **change})


def test_readers_of_layers_of_one_shape_refuse_others_by_name() -> None:
    made = KVGeometry.model_validate({**UNEQUAL, "state_bytes": 24})
    message = (
        "the model has layers of different num_kv_heads, layers of different head_dim, values of other dims than keys,"
        " layers that share keys and values; a reader needs the same heads"
    )
    with pytest.raises(BuildError, match=message):
        made.uniform("a reader")
    for name in ("block_shape", "width"):
        with pytest.raises(BuildError, match="needs the same heads and dims in all layers"):
            getattr(made, name)


def test_layers_that_differ_in_windows_alone_have_one_shape() -> None:
    made = KVGeometry(num_layers=2, num_kv_heads=2, head_dim=8, window=(0, 4))
    assert made.unequal is None
    assert made.strides(1) == KVGeometry(num_layers=2, num_kv_heads=2, head_dim=8).strides(1)
    assert made.model_dump()["window"] == (0, 4)


PARTED = {
    "equal": geometry(),
    "scales": geometry("int8"),
    "grouped": KVGeometry(num_layers=4, num_kv_heads=2, head_dim=64, block_tokens=5, dtype="int4", int4_group=32),
    "mixed": geometry("k8v4"),
    "unequal": KVGeometry(num_layers=3, num_kv_heads=(2, 1, 3), head_dim=(8, 16, 4), window=(0, 4, 0), dtype="int8"),
    "latent": KVGeometry(num_layers=3, num_kv_heads=1, head_dim=24, value_dim=0, dtype="float16"),
    "shared": KVGeometry(num_layers=4, num_kv_heads=2, head_dim=8, shares=(0, 1, 0, 1), dtype="fp8"),
}


@each_case("name", PARTED)
def test_parts_of_a_block_hold_each_byte_of_a_layer_once_in_its_own_place(name: str) -> None:
    whole = PARTED[name]
    divisions = [[0, 2], [1, 3]] if whole.num_layers == 4 else [[0, 2], [1]]
    owner = np.zeros(whole.block_bytes, np.int64)
    for number, layers in enumerate(divisions, 1):
        part = whole.part(layers)
        assert [one.window for one in part.layers] == [whole.layers[layer].window for layer in layers]
        inside = np.zeros(part.block_bytes, np.int64)
        for run in whole.block_runs(part, layers):
            assert not owner[run.whole : run.whole + run.bytes].any()
            owner[run.whole : run.whole + run.bytes] = number
            inside[run.part : run.part + run.bytes] += 1
        assert inside.max() == 1
        for own, layer in zip(part.layers, layers, strict=True):
            of_whole = whole.layers[layer]
            assert owner[of_whole.keys] == number
            assert (own.key_bytes, own.value_bytes) == (of_whole.key_bytes, of_whole.value_bytes)
    assert np.count_nonzero(owner) >= whole.code_bytes
    assert np.count_nonzero(owner == 0) < 128, "padding alone belongs to no part"


def test_a_part_without_attention_has_no_block_and_keeps_its_states() -> None:
    parts = [
        {"layer": 0, "kind": "convolution", "offset": 0, "bytes": 48},
        {"layer": 0, "kind": "scan", "offset": 64, "bytes": 96},
        {"layer": 2, "kind": "scan", "offset": 192, "bytes": 32},
    ]
    whole = KVGeometry.model_validate(
        {"num_layers": 1, "num_kv_heads": 1, "head_dim": 8, "state_bytes": 256, "state": parts}
    )
    part = whole.part((), {(0, "scan"), (2, "scan")})
    assert (part.num_layers, part.block_bytes) == (0, 0)
    assert [(one.layer, one.offset, one.bytes) for one in part.state] == [(0, 0, 96), (2, 128, 32)]
    assert [tuple(run) for run in whole.state_runs(part)] == [(0, 64, 96), (128, 192, 32)]
    assert whole.part((0,)).state_bytes == 0
