"""Safer variants take the launches of the kernels that they replace."""

from pathlib import Path
from typing import Any

import numpy as np

from tests.simulators.triton_interpreter import use_interpreter

use_interpreter()

import torch  # noqa: E402
from benchmarks.gpu.proofs.kernel_cases import caught  # noqa: E402
from benchmarks.gpu.proofs.ladder import all_warps_alike, rungs  # noqa: E402
from benchmarks.gpu.proofs.shapes import Place  # noqa: E402
from triton.runtime.interpreter import InterpretedFunction  # noqa: E402

from ingot.artifact.programs.launch_program import Kernel, Launch  # noqa: E402
from ingot.pipeline.targets.cuda.kernel_signatures import SIGNATURES, make_kernel  # noqa: E402
from ingot.pipeline.targets.cuda.lowering import lower_to_launches  # noqa: E402
from ingot.pipeline.targets.cuda.program_builder import Bucket  # noqa: E402
from tests.kernels import prefill_cases  # noqa: E402
from tests.simulators.interpreted_kernels import kernel_function  # noqa: E402
from tests.simulators.launch_programs import CHECKPOINTS, CONTEXT, FLOATS, AlwaysWide, fused, imported  # noqa: E402

WIDE = "matmul_int4_wide-"
_USUAL = InterpretedFunction.run


def test_attention_of_prompts_runs_with_all_warps_alike_on_the_same_arguments_and_grid() -> None:
    def run(kernel: Kernel, grid: tuple[int, int, int], values: list[Any]) -> None:
        assert (kernel.name, kernel.num_warps) == ("prefill_attention", 12)
        variant = all_warps_alike(kernel)
        assert variant.num_warps == 4 + 4
        assert SIGNATURES[variant.name].worker_warps == 0
        function, constants = kernel_function(variant)
        catching, InterpretedFunction.run = InterpretedFunction.run, _USUAL
        try:
            function[grid](*values, **constants)
        finally:
            InterpretedFunction.run = catching

    case = next(case for case in prefill_cases.cases() if "softcap" in case.shape)
    with np.errstate(all="ignore"), caught(run, narrow=False), torch.no_grad():
        assert case.errors()[1] <= case.limit


def test_warps_and_loads_ahead_of_gluon_kernels_change_with_their_constants() -> None:
    constants = {"AHEAD": 2, "WARPS": 4, "GROUP": 128, "N": 1536, "COLUMNS": 2048}
    kernel = make_kernel("grouped_matmul_int4", {"T": "bf16", "S": "fp16", "OUT": "bf16"}, constants, num_stages=2)
    launch = Launch(kernel="grouped", grid=(8, 24, 1), arguments=(), node="experts")
    found = rungs(Place(Path("experts.zip"), "decode-1", 0, launch, kernel))
    assert {
        name: (one.num_warps, one.constants["WARPS"], one.constants["AHEAD"]) for name, (one, _) in found.items()
    } == {
        "one stage": (4, 4, 1),
        "fewer warps": (2, 2, 2),
    }


def test_a_wide_matmul_has_a_direct_variant_where_its_programs_store_their_own_partials() -> None:
    model = fused(imported(CHECKPOINTS / "llama", ("quantize-weights", {"block_size": "channel", **FLOATS})))
    (program,) = (lowered := lower_to_launches(model, (Bucket.decode(4, CONTEXT),), "fp16", AlwaysWide(sm=90))).programs
    launch = next(one for one in program.launches if isinstance(one, Launch) and one.kernel.startswith(WIDE))
    kernel = lowered.shared.kernels[launch.kernel]
    ((name, (variant, grid)),) = rungs(Place(Path("llama.zip"), "decode-4", 0, launch, kernel)).items()
    assert (name, variant.name, variant.num_warps) == ("all warps alike", "matmul_int4", 4)
    assert variant.constants.keys() - kernel.constants.keys() == {"AHEAD", "WARPS"}
    assert grid == (1, -(-int(kernel.constants["N"]) // 64), 1)
    folded = kernel.model_copy(update={"constants": {**kernel.constants, "SPLITS": 8, "FOLDS": True}})
    assert rungs(Place(Path("llama.zip"), "decode-4", 0, launch, folded)) == {}
