"""Attention in launch programs: the KV pool in every precision."""

import numpy as np
import pytest

from ingot.artifact.kv_geometry import KVType
from ingot.passes.model_facts import KV
from tests.simulators.launch_programs import (
    CHECKPOINTS,
    fused,
    imported,
    logits_by_program,
    prompts,
)
from tests.simulators.rounded_pool import RoundedPool

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
