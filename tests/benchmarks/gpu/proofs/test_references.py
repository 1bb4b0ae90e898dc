"""References against the interpreted kernels, in every case of the kernels' own tests."""

import ctypes
from typing import Any

import numpy as np

from tests.simulators.triton_interpreter import use_interpreter

use_interpreter()

import torch  # noqa: E402
from benchmarks.gpu.proofs.kernel_cases import caught  # noqa: E402
from benchmarks.gpu.proofs.operands import Operands, block_error  # noqa: E402
from benchmarks.gpu.proofs.recording import Bound  # noqa: E402
from benchmarks.gpu.proofs.references import REFERENCES  # noqa: E402
from triton.runtime.interpreter import InterpretedFunction  # noqa: E402

from ingot.artifact.programs.launch_program import Kernel  # noqa: E402
from ingot.pipeline.targets.cuda.kernel_signatures import SIGNATURES  # noqa: E402
from tests.each_case import each_case  # noqa: E402
from tests.kernels.all_cases import all_cases  # noqa: E402
from tests.kernels.cases import Case  # noqa: E402
from tests.simulators.interpreted_kernels import kernel_function  # noqa: E402

LIMIT = 6e-3  # of a block in float16
_MOST = 8  # cases of a kernel
_USUAL = InterpretedFunction.run


def spaced_cases() -> list[Case]:
    """Some cases of every kernel that has a reference, spaced over all."""
    by_kernel: dict[str, list[Case]] = {}
    for case in all_cases():
        if case.kernel in REFERENCES:
            by_kernel.setdefault(case.kernel, []).append(case)
    return [case for cases in by_kernel.values() for case in cases[:: max(1, len(cases) // _MOST)]]


@each_case("case", spaced_cases(), ids=str)
def test_a_reference_is_what_the_interpreted_kernel_writes(case: Case) -> None:
    compared: list[str] = []

    def run(kernel: Kernel, grid: tuple[int, int, int], values: list[Any]) -> None:
        outputs = []
        if kernel.name in REFERENCES:
            outputs = REFERENCES[kernel.name](_operands(kernel, grid, values))
        function, constants = kernel_function(kernel)
        catching, InterpretedFunction.run = InterpretedFunction.run, _USUAL
        try:
            function[grid](*values, **constants)
        finally:
            InterpretedFunction.run = catching
        for output in outputs:
            error = block_error(output.found(), output.expected)
            assert error <= (LIMIT if output.limit is None else output.limit), (kernel.name, output.name, error)
            compared.append(kernel.name)

    with np.errstate(all="ignore"), caught(run, narrow=False):
        case.run()
    assert case.kernel in compared


def _operands(kernel: Kernel, grid: tuple[int, int, int], values: list[Any]) -> Operands:
    """The launch with host addresses in place of tensors."""
    numbers = [value.data_ptr() if isinstance(value, torch.Tensor) else value or 0 for value in values]
    bound = Bound(None, kernel, grid, list(zip(kernel.types, numbers, strict=True)), kernel.name)
    named = dict(zip(SIGNATURES[kernel.name].arguments, values, strict=True))
    sequences = len(named["lengths"]) if "lengths" in named else 0
    return Operands(bound, _alias, sequences)


def _alias(address: int, size: int) -> torch.Tensor:
    return torch.from_numpy(np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address)))
