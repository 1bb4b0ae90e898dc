"""Layouts of stored weights: codes, scales and zero points as the kernels read them."""

import pytest

from ingot.errors import PassError
from ingot.passes.numerics.scheme import is_float16
from ingot.pipeline.targets.cuda.lowering import lower_to_launches
from ingot.pipeline.targets.cuda.program_builder import Bucket
from tests.simulators.launch_programs import (
    CHECKPOINTS,
    CONTEXT,
    fused,
    imported,
)

FLOATS = {"lm_head": "none", "embedding": "none"}


def test_scales_of_blocks_have_16_bits_where_activations_do() -> None:
    model = fused(imported(CHECKPOINTS / "llama", ("quantize-weights", {"bits": 8, "block_size": 32, **FLOATS})))
    lowered = lower_to_launches(model, (Bucket.decode(4, CONTEXT),), "fp16")
    types = {name: weight.type for name, weight in lowered.shared.weights.items()}
    assert {kind for name, kind in types.items() if name.endswith(".scale.groups")} == {"fp16"}


def test_float16_scales_are_stored_as_they_are() -> None:
    options = {"bits": 8, "block_size": 32, "scale_dtype": "float16", **FLOATS}
    model = fused(imported(CHECKPOINTS / "llama", ("quantize-weights", options)))
    lowered = lower_to_launches(model, (Bucket.decode(4, CONTEXT),), "fp16")
    scales = [weight for name, weight in lowered.shared.weights.items() if name.endswith(".scale.groups")]
    assert {weight.type for weight in scales} == {"fp16"}
    assert all(is_float16(weight.make()) for weight in scales)


def test_block_sizes_without_a_kernel_are_refused_by_name() -> None:
    model = fused(imported(CHECKPOINTS / "llama", ("quantize-weights", {"block_size": 16, **FLOATS})))
    message = r"'model.layers.0.*.weight' has 32 columns in blocks of 16, .* multiple of 32: set its block_size to 32, "
    with pytest.raises(PassError, match=message):
        lower_to_launches(model, (Bucket.decode(4, CONTEXT),))
