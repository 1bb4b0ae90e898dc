"""Attention in launch programs: the KV pool in every precision."""

from typing import Any

import numpy as np
import pytest

from ingot.artifact.kv_geometry import KVType
from ingot.passes.model_facts import KV
from ingot.pipeline.targets.cuda.attention_operands import HeadSizes, QueryTile
from ingot.pipeline.targets.cuda.lower_attention import specialized_tile
from tests.simulators.launch_programs import (
    CHECKPOINTS,
    fused,
    imported,
    logits_by_program,
    prompts,
)
from tests.simulators.rounded_pool import RoundedPool

ON_90: dict[str, Any] = {"block_tokens": 16, "is_quantized": False, "sm": 90}
LLAMA = CHECKPOINTS / "llama"


@pytest.mark.parametrize("precision", ["fp8", "int8", "int4"])
def test_a_quantized_pool_gives_the_bits_of_one_with_rounded_vectors(
    precision: KVType,
) -> None:
    ids = prompts(5)
    model = fused(imported(LLAMA))
    found = logits_by_program(model, ids, precision)[0]
    head_dim = KV.of(model).layers[0].key_dim
    wanted = logits_by_program(model, ids, device=RoundedPool(precision, head_dim))[0]
    np.testing.assert_array_equal(found, wanted)


def test_warps_that_copy_are_for_16_bit_pools_on_sm_90_and_heads_that_share_keys() -> None:
    llama, qwen = HeadSizes(32, 8, 128), HeadSizes(14, 2, 64)
    assert specialized_tile(llama, **ON_90) == QueryTile(32, 4, 12, 128)
    assert specialized_tile(qwen, **ON_90) == QueryTile(16, 8, 12, 128)
    for change in ({"sm": 80}, {"sm": None}, {"is_quantized": True}, {"block_tokens": 4}, {"block_tokens": 256}):
        assert specialized_tile(llama, **{**ON_90, **change}) is None
    assert specialized_tile(llama, **ON_90, is_float32=True) is None
    for sizes in (HeadSizes(16, 8, 128), HeadSizes(8, 8, 64), HeadSizes(8, 2, 256), HeadSizes(8, 2, 96)):
        assert specialized_tile(sizes, **ON_90) is None
