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
from tests.kernels import prefill_cases  # noqa: E402
from tests.simulators.interpreted_kernels import kernel_function  # noqa: E402

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
