"""Attention in launch programs: the KV pool in every precision."""

from typing import Any

import numpy as np
import pytest

from ingot.artifact.kv_geometry import KVType
from ingot.artifact.programs.launch_program import ActivationType, Launch
from ingot.errors import PassError
from ingot.passes.model_facts import KV
from ingot.pipeline.targets.cuda.attention_operands import HeadSizes, QueryTile
from ingot.pipeline.targets.cuda.lower.attention import ragged_tile, specialized_tile
from ingot.pipeline.targets.cuda.lowering import lower_to_launches
from ingot.pipeline.targets.cuda.program_builder import Bucket
from tests.simulators.launch_programs import (
    CHECKPOINTS,
    CONTEXT,
    fused,
    imported,
    logits_by_program,
    prompts,
)
from tests.simulators.rounded_pool import RoundedPool

ON_90: dict[str, Any] = {"block_tokens": 16, "is_quantized": False, "sm": 90}
LLAMA = CHECKPOINTS / "llama"
_ACTIVATIONS: tuple[ActivationType, ...] = ("fp16", "bf16", "fp32")


@pytest.mark.parametrize("precision", ["fp8", "int8", "int4"])
def test_a_quantized_pool_gives_the_logits_of_one_with_rounded_vectors(precision: KVType) -> None:
    ids = prompts(5)
    model = fused(imported(LLAMA))
    found = logits_by_program(model, ids, precision)[0]
    head_dim = KV.of(model).layers[0].key_dim
    wanted = logits_by_program(model, ids, device=RoundedPool(precision, head_dim))[0]
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-6)  # scales multiply scores and shares in decode steps


def test_warps_that_copy_are_for_16_bit_pools_on_sm_90_and_heads_of_64_and_128() -> None:
    llama, qwen = HeadSizes(32, 8, 128), HeadSizes(14, 2, 64)
    assert specialized_tile(llama, **ON_90) == QueryTile(32, 4, 12, 128)
    assert specialized_tile(qwen, **ON_90) == QueryTile(16, 8, 12, 128)
    assert specialized_tile(HeadSizes(16, 8, 128), **ON_90) == QueryTile(64, 2, 12, 128)
    assert specialized_tile(HeadSizes(8, 8, 64), **ON_90) == QueryTile(128, 1, 12, 128)
    for change in ({"sm": 80}, {"sm": None}, {"is_quantized": True}, {"block_tokens": 4}, {"block_tokens": 256}):
        assert specialized_tile(llama, **{**ON_90, **change}) is None
    assert specialized_tile(llama, **ON_90, is_float32=True) is None
    for sizes in (HeadSizes(8, 2, 256), HeadSizes(8, 2, 96)):
        assert specialized_tile(sizes, **ON_90) is None


def test_a_tile_of_codes_has_fewer_rows_or_keys_only_where_registers_do_not_suffice() -> None:
    def tile(dim: int, sm: int | None, *, codes: bool = True) -> QueryTile:
        return ragged_tile(HeadSizes(32, 8, dim), is_quantized=codes, sm=sm)

    assert tile(128, 90) == tile(128, 80, codes=False) == QueryTile(32, 4, 8, 64)
    assert tile(128, 80) == tile(128, None) == QueryTile(32, 4, 8, 32)
    assert tile(64, 80) == tile(64, 90) == QueryTile(32, 4, 8, 64)
    assert (tile(256, 80), tile(256, 90)) == (QueryTile(8, 4, 8, 32), QueryTile(16, 4, 8, 32))


def test_layers_of_several_shapes_have_pools_of_their_own_in_a_block_and_shared_ones_are_written_once() -> None:
    found = lower_to_launches(fused(imported(CHECKPOINTS / "gemma4_text")), (Bucket.decode(4, CONTEXT),))
    steps = [step for step in found.programs[0].launches if isinstance(step, Launch)]
    writes = [step for step in steps if step.kernel.startswith("rotary_kv_write")]
    given = [one for step in writes for one in step.arguments if one.kind == "buffer"]
    pools = [one.offset for one in given if one.name == "kv_pool"]
    geometry = found.shared.kv
    assert pools == [geometry.pool_offset(layer) for layer in range(4)]
    assert pools[:2] == pools[2:]
    tiles = [step.grid[1] for step in writes]  # of four heads: queries, then keys and values
    assert tiles == [2, 2, 1, 1]
    attends = [found.shared.kernels[step.kernel] for step in steps if step.kernel.startswith("decode_attention")]
    assert [kernel.constants["DIM"] for kernel in attends] == [8, 16, 8, 16]


def test_keys_that_do_not_begin_where_kernels_read_them_are_refused() -> None:
    model = fused(imported(CHECKPOINTS / "gemma4_text"))
    KV.record(model, KV.of(model).model_copy(update={"block_tokens": 3, "dtype": "int8"}))
    with pytest.raises(PassError, match=r"'layers.1.*: in blocks of 3 tokens the keys of layer 1, or their"):
        lower_to_launches(model, (Bucket.decode(4, CONTEXT),))


def test_a_head_of_512_is_read_in_smaller_tiles_by_more_warps() -> None:
    small, large = HeadSizes(32, 4, 256), HeadSizes(32, 4, 512)
    assert (small.tile, small.num_warps) == (32, 4)
    assert (large.tile, large.num_warps) == (16, 8)
    assert HeadSizes(32, 4, 512, in_4_bits=True).tile == 32
    usual = HeadSizes(32, 8, 128)
    assert [usual.decode_tile(kind, is_quantized=True) for kind in _ACTIVATIONS] == [64, 64, 32]
    assert (usual.decode_tile("bf16", is_quantized=False), small.decode_tile("bf16", is_quantized=True)) == (32, 32)
    assert large.decode_tile("bf16", is_quantized=True) == large.tile
