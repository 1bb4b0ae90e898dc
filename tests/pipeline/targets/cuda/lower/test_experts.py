"""Mixtures of experts as launch programs, in the interpreter, against plain onnxruntime in float32."""

from collections import Counter

import numpy as np
import onnx_ir as ir
import pytest

from ingot.artifact.programs.launch_program import Launch, NumberArgument
from ingot.errors import PassError
from ingot.pipeline.targets.cuda.lowering import LoweredLaunches, lower_to_launches
from ingot.pipeline.targets.cuda.program_builder import Bucket
from ingot.pipeline.targets.cuda.tiles import MatmulShape, grouped_tile
from tests.each_case import each_case
from tests.simulators.launch_programs import (
    CHECKPOINTS,
    CONTEXT,
    FLOATS,
    INT4,
    INT8,
    Entry,
    error_of_program,
    fused,
    imported,
    set_block_size,
)

LIMIT = 2e-5


_NAMES = ["mixtral", "mixtral-fused", "qwen3_moe", "gpt_oss", "granitemoe", "glm4_moe", "qwen2_moe"]
_NAMES += ["minimax_m2", "exaone_moe", "granitemoe_swa", "hy_v3", "phimoe", "dbrx"]
_NAMES += ["nemotron_h-experts", "nemotron_h-latent-experts"]


@each_case("name", _NAMES)
def test_logits_equal_onnxruntimes(name: str) -> None:
    assert error_of_program(CHECKPOINTS / name) <= LIMIT


@each_case(("name", "form"), [("mixtral", INT4), ("qwen3_moe", INT8), ("gpt_oss", INT4), ("nemotron_h-experts", INT4)])
def test_logits_of_packed_experts_equal_onnxruntimes(name: str, form: Entry) -> None:
    assert error_of_program(CHECKPOINTS / name, form) <= LIMIT


def test_codes_go_from_memory_to_tensor_cores_with_activations_of_16_bits() -> None:
    assert error_of_program(CHECKPOINTS / "mixtral", INT4, activations="fp16") <= 2e-2


@each_case("name", ["olmoe", "ernie4_5_moe", "hunyuan_v1_moe"])
def test_other_families_have_a_kernel_for_every_node(name: str) -> None:
    assert lower_to_launches(fused(imported(CHECKPOINTS / name)), (Bucket.decode(4, CONTEXT),)).programs


def lowered(name: str, *quantization: Entry) -> LoweredLaunches:
    model = fused(imported(CHECKPOINTS / name, *quantization))
    return lower_to_launches(model, (Bucket.decode(4, CONTEXT),), "fp16")


def kernels_of_a_layer(name: str, *quantization: Entry) -> Counter[str]:
    launches = lowered(name, *quantization).programs[0].launches
    return Counter(
        step.kernel.partition("-")[0] for step in launches if isinstance(step, Launch) and "layers.1.mlp" in step.node
    )


def test_a_mixture_is_six_launches_whatever_its_experts() -> None:
    once = dict.fromkeys(("matmul", "route_rows", "sort_by_expert", "combine_experts"), 1)
    assert kernels_of_a_layer("mixtral") == {**once, "grouped_matmul": 2}
    assert kernels_of_a_layer("mixtral", INT4) == {**once, "matmul": 1, "grouped_matmul_int4": 2}
    assert kernels_of_a_layer("gpt_oss") == {**once, "grouped_matmul": 2, "gated_activation": 1}  # of a clamped SwiGLU


def test_a_program_has_as_many_tiles_as_any_choice_needs() -> None:
    found = lowered("mixtral")
    last = {launch.arguments[-1] for launch in launches(found, "sort_by_expert")}
    (sort,) = {argument.value for argument in last if isinstance(argument, NumberArgument)}
    grids = {launch.grid[0] for launch in launches(found, "grouped_matmul")}
    assert grids == {sort}
    (rows,) = {
        kernel.constants["TILE_ROWS"] for kernel in found.shared.kernels.values() if kernel.name == "sort_by_expert"
    }
    pairs, experts = 8, 4
    most = max(
        sum(-(-count // int(rows)) for count in np.bincount(ids, minlength=experts))
        for ids in (np.arange(pairs) % experts, np.zeros(pairs, int), np.arange(pairs) // 3)
    )
    assert sort >= most


def launches(found: LoweredLaunches, name: str) -> list[Launch]:
    """The launches of one kernel in the first program."""
    steps = found.programs[0].launches
    return [step for step in steps if isinstance(step, Launch) and step.kernel.startswith(f"{name}-")]


@each_case("rows", [1, 3, 16, 500])
def test_a_grouped_tile_does_not_split_sums_and_is_of_the_weight_alone_in_invariant_programs(rows: int) -> None:
    for kernel, bits in (("matmul", 16), ("matmul_nbits", 4), ("matmul_nbits", 8)):
        shape = MatmulShape.model_validate({"kernel": kernel, "rows": rows, "n": 1536, "columns": 2048, "bits": bits})
        usual, invariant = (grouped_tile(shape, invariant=one) for one in (False, True))
        assert usual.splits == invariant.splits == 1
        assert usual.rows <= invariant.rows == 64


def test_experts_without_a_kernel_are_refused_by_name() -> None:
    static: Entry = ("quantize-activations", {})
    with pytest.raises(
        PassError, match=r"'layers.0.mlp.combine' adds experts other than down\(act\(gate\) \* up\) and down\("
    ):
        lowered(
            "mixtral", ("quantize-weights", {"bits": 8, "block_size": "channel", "symmetric": True, **FLOATS}), static
        )
    mixed = imported(CHECKPOINTS / "mixtral", INT4)
    set_block_size(mixed, "layers.0.mlp.experts.1.down_proj", 64)
    with pytest.raises(
        PassError, match=r"'layers.0.mlp.experts.0.down_proj' and 'layers.0.mlp.experts.1.down_proj' have"
    ):
        lower_to_launches(fused(mixed), (Bucket.decode(4, CONTEXT),), "fp16")
    grouped = imported(CHECKPOINTS / "glm4_moe")
    route = next(node for node in grouped.graph if node.op_type == "RouteExperts")
    route.attributes["group_best"] = ir.AttrInt64("group_best", 3)
    with pytest.raises(PassError, match=r"ranks groups of experts by their 3 largest scores"):
        lower_to_launches(fused(grouped), (Bucket.decode(4, CONTEXT),), "fp16")
