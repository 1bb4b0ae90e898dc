"""quantize-kv-cache: the KV geometry has the precision, and nothing else changes."""

import onnx_ir as ir
import pytest

from ingot.artifact import KVGeometry
from ingot.errors import PassError
from ingot.passes.model_facts import KV
from ingot.passes.quantization.quantize_kv_cache import QuantizeKVCache
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.model.importer import import_checkpoint
from tests.data_paths import ROOT

LLAMA = ROOT / "tests" / "fixtures" / "checkpoints" / "llama"


def geometry(model: ir.Model) -> KVGeometry:
    return KV.of(model)


@pytest.mark.parametrize(
    ("precision", "share"), [("float16", 2), ("bfloat16", 2), ("fp8", 4), ("int8", 4), ("int4", 8)]
)
def test_a_block_holds_its_codes_and_the_scales_that_they_need(precision: str, share: int) -> None:
    model = import_checkpoint(Checkpoint.open(LLAMA))
    before, nodes = geometry(model), list(model.graph)
    one_scale = QuantizeKVCache(precision=precision, group=0)  # type: ignore[arg-type]
    assert one_scale(model).modified
    after = geometry(model)
    assert after == before.model_copy(update={"dtype": precision})
    vectors = sum(2 * layer.num_kv_heads * before.block_tokens for layer in before.layers)
    assert after.block_bytes == before.block_bytes // share + (2 * vectors if after.is_quantized else 0)
    assert list(model.graph) == nodes
    assert not one_scale(model).modified


def test_float32_leaves_the_cpu_with_its_own_type_and_takes_back_another() -> None:
    model = import_checkpoint(Checkpoint.open(LLAMA))
    before = geometry(model)
    assert not QuantizeKVCache(precision="float32")(model).modified
    assert geometry(model) == before
    QuantizeKVCache(precision="float16")(model)
    assert QuantizeKVCache(precision="float32")(model).modified
    assert geometry(model) == before


@pytest.mark.parametrize(("precision", "grouped_sides"), [("int4", 2), ("k8v4", 1)])
def test_int4_has_a_scale_and_a_minimum_for_each_group(precision: str, grouped_sides: int) -> None:
    model = import_checkpoint(Checkpoint.open(LLAMA))
    KV.record(model, geometry(model).model_copy(update={"head_dim": 80}))
    one_scale, grouped = (QuantizeKVCache(precision=precision, group=group) for group in (0, 32))  # type: ignore[arg-type]
    one_scale(model)
    before = geometry(model)
    assert grouped(model).modified
    after = geometry(model)
    assert after.int4_group == 32
    vectors = sum(grouped_sides * layer.num_kv_heads * before.block_tokens for layer in before.layers)
    assert after.block_bytes == before.block_bytes + vectors * (2 * 3 - 1) * 2  # groups of 32, 32 and 16; float16
    assert not grouped(model).modified


def test_the_group_is_left_out_where_no_values_are_int4() -> None:
    assert QuantizeKVCache(precision="int8").kv_group == 0
    assert str(QuantizeKVCache(precision="int4")) == "quantize-kv-cache: {precision: int4}"


def test_int4_refuses_heads_of_an_odd_size() -> None:
    model = import_checkpoint(Checkpoint.open(LLAMA))
    odd = geometry(model).model_copy(update={"head_dim": 15})
    KV.record(model, odd)
    with pytest.raises(PassError, match="heads have 15 dims, and two share a byte of int4; use int8"):
        QuantizeKVCache(precision="int4")(model)
