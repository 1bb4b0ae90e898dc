"""Latent attention as launch programs, in the interpreter, against plain onnxruntime in float32."""

from collections import Counter

import numpy as np
import pytest

from ingot.artifact.kv_geometry import KVType
from ingot.artifact.programs.launch_program import Launch
from ingot.errors import PassError
from ingot.passes.model_facts import KV
from ingot.pipeline.targets.cuda.attention_operands import Chunks
from ingot.pipeline.targets.cuda.lower.latents import LatentTile
from ingot.pipeline.targets.cuda.lowering import LoweredLaunches, lower_to_launches
from ingot.pipeline.targets.cuda.program_builder import Bucket
from tests.each_case import each_case
from tests.simulators.launch_programs import (
    CHECKPOINTS,
    CONTEXT,
    INT4,
    INT8,
    Entry,
    error_of_program,
    fused,
    imported,
    logits_by_program,
    prompts,
    set_block_size,
)
from tests.simulators.rounded_pool import RoundedPool

LIMIT = 2e-5


@each_case("name", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite", "mistral4", "minicpm3", "youtu"])
def test_logits_equal_onnxruntimes(name: str) -> None:
    assert error_of_program(CHECKPOINTS / name) <= LIMIT


@each_case(("name", "form"), [("minicpm3", INT4), ("youtu", INT8)])
def test_logits_of_packed_layers_of_heads_equal_onnxruntimes(name: str, form: Entry) -> None:
    assert error_of_program(CHECKPOINTS / name, form) <= LIMIT


@each_case("precision", ["fp8", "int8"])
def test_a_pool_of_eight_bits_gives_the_bits_of_one_with_rounded_latents(precision: KVType) -> None:
    ids, model = prompts(10, 3), fused(imported(CHECKPOINTS / "youtu"))
    found = logits_by_program(model, ids, precision)
    rounded = RoundedPool(precision, KV.of(model).layers[0].key_dim)
    for one, wanted in zip(found, logits_by_program(model, ids, device=rounded), strict=True):
        np.testing.assert_array_equal(one, wanted)


def lowered(name: str, *quantization: Entry, invariant: bool = False) -> LoweredLaunches:
    buckets = [Bucket.ragged(rows, CONTEXT, 8) for rows in (8, 40)]
    if not invariant:
        buckets[0] = Bucket.decode(4, CONTEXT)
    model = fused(imported(CHECKPOINTS / name, *quantization))
    return lower_to_launches(model, buckets, "fp16", batch_invariant=invariant)


def kernels(found: LoweredLaunches, bucket: int) -> Counter[str]:
    """Kernels of the second layer's attention."""
    steps = found.programs[bucket].launches
    return Counter(
        step.kernel.partition("-")[0]
        for step in steps
        if isinstance(step, Launch) and step.node.endswith("layers.1.self_attn.attention")
    )


@each_case(("form", "matmul"), [((), "head_matmul"), ((INT4,), "head_matmul_nbits")])
def test_an_attention_is_four_launches_whatever_its_heads(form: tuple[Entry, ...], matmul: str) -> None:
    found = lowered("deepseek_v3", *form)
    assert kernels(found, 0) == {matmul: 2, "latent_kv_write": 1, "latent_decode_attention": 1}
    assert kernels(found, 1) == {matmul: 2, "latent_kv_write": 1, "latent_ragged_attention": 1}


def test_batch_invariant_buckets_have_the_same_kernels() -> None:
    found = lowered("deepseek_v3", invariant=True)
    first, other = (
        {step.kernel for step in program.launches if isinstance(step, Launch) and "self_attn" in step.node}
        for program in found.programs
    )
    assert first == other
    assert kernels(found, 0)["latent_ragged_attention"] == 1


def test_buckets_of_few_rows_multiply_heads_in_one_order() -> None:
    model = fused(imported(CHECKPOINTS / "deepseek_v3", INT4))
    found = lower_to_launches(model, [Bucket.decode(rows, CONTEXT) for rows in (1, 16, 64)], "fp16")
    forms = {tuple(kernel.constants[name] for name in ("TILE_ROWS", "SCALE_WEIGHTS", "SPANS_AT_ONCE"))
             for kernel in found.shared.kernels.values() if kernel.name == "head_matmul_nbits"}  # fmt: skip
    assert forms == {(16, False, 1), (32, False, 1)}  # from 64 rows on SM 90 has other instructions


def test_sums_of_chunks_stay_below_five_megabytes_a_sequence() -> None:
    assert [Chunks.of_latents(131072, 1, heads, 4).count for heads in (16, 40, 128)] == [64, 51, 16]
    assert Chunks.of_latents(1024, 1, 16, 4).count == 8
    rows = [
        [LatentTile.of(512, sm=sm, is_float32=False, is_ragged=ragged).rows for sm in (80, 89, 90, None)]
        for ragged in (False, True)
    ]
    assert rows == [[32, 16, 32, 16], [32, 32, 64, 32]]


def test_other_forms_are_refused_by_name() -> None:
    model = fused(imported(CHECKPOINTS / "youtu"))
    split = next(node for node in model.graph if node.name == "layers.0.self_attn.latents")
    split.op_type = "Identity"
    with pytest.raises(PassError, match=r"'layers.0.self_attn.attention' has latent attention in another form"):
        lower_to_launches(model, (Bucket.decode(4, CONTEXT),))
    mixed = imported(CHECKPOINTS / "youtu", INT4)
    set_block_size(mixed, "layers.0.self_attn.key_up.1", 64)
    with pytest.raises(
        PassError, match=r"key_up.0' and 'layers.0.self_attn.key_up.1' .* multiply all heads of a layer"
    ):
        lower_to_launches(fused(mixed), (Bucket.decode(4, CONTEXT),))
