"""Kernels and library matmuls of launch programs on the CPU: in Triton's interpreter, and in torch.

Constants that choose the type of a matmul keep it in float32 where the GPU would use tensor cores. bfloat16 is not
supported: the interpreter's results in it are not a GPU's.
"""

import ctypes
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
import triton.language as tl

from ingot.artifact.programs.launch_program import Kernel, LibraryMatmul
from ingot.pipeline.targets.cuda.kernel_signatures import SIGNATURES
from tests.kernels import torch_types
from tests.simulators import gluon_emulator

TORCH_TYPES = {name: kind for name, kind in torch_types.TORCH_TYPES.items() if name != "bf16"}
_DOT_TYPES = {"fp32": tl.float32, "fp16": tl.float16}
_NUMBERS: dict[str, Any] = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}


def kernel_function(kernel: Kernel) -> tuple[Any, dict[str, Any]]:
    """The interpreted function of a kernel, and its constants."""
    module, _, name = SIGNATURES[kernel.name].function.partition(".")
    function = getattr(import_module(f"ingot.kernels.{module}"), name)
    if SIGNATURES[kernel.name].worker_warps:
        gluon_emulator.install(import_module(f"ingot.kernels.{module}"))
    if int(kernel.constants.get("AHEAD", 0)) > 2:  # sums of 4-bit matmuls of rows and of experts, from copied codes
        gluon_emulator.install(import_module("ingot.kernels.matmul_int4"))
    return function, {key: _constant(key, value) for key, value in kernel.constants.items()}


def multiply(matmul: LibraryMatmul, operands: Mapping[str, torch.Tensor]) -> None:
    """Compute a library's matmul on flat operands: sums in float32, scaled, rounded once."""
    x = operands["x"].as_strided((matmul.rows, matmul.columns), (matmul.x_stride, 1)).float()
    weight = operands["weight"].as_strided((matmul.n, matmul.columns), (matmul.columns, 1)).float()
    result = matmul.alpha * (x @ weight.T)
    if "x_scales" in operands:
        result *= operands["x_scales"][: matmul.rows, None] * operands["weight_scales"][None, : matmul.n]
    if "bias" in operands:
        result += operands["bias"][: matmul.n].float()
    operands["out"].as_strided((matmul.rows, matmul.n), (matmul.out_stride, 1)).copy_(result)


def run_from_parameters(code: bytes, x: int, y: int, z: int, threads: int, shared: int, parameters: Any) -> None:
    """Run a launch from the addresses of its parameters, as driver_shim.c passes it on.

    Two pointers to scratch memory follow the kernel's own parameters; they must be null.
    """
    kernel = Kernel.model_validate_json(code.split(b"\n", 2)[2])
    count = len(kernel.types)
    arguments = [_parameter(kind, parameters[index]) for index, kind in enumerate(kernel.types)]
    scratch = [ctypes.c_uint64.from_address(parameters[count + index]).value for index in range(2)]
    assert scratch == [0, 0]
    assert threads == 32 * kernel.num_warps
    function, constants = kernel_function(kernel)
    function[x, y, z](*arguments, **constants)


def _parameter(kind: str, place: int) -> Any:
    if not kind.startswith("*"):
        return _NUMBERS[kind].from_address(place).value
    address, dtype = ctypes.c_uint64.from_address(place).value, TORCH_TYPES[kind[1:]]
    if address == 0:
        return torch.zeros(1, dtype=dtype)
    memory = (ctypes.c_uint8 * dtype.itemsize).from_address(address)  # the interpreter uses the address, not the size
    return torch.frombuffer(memory, dtype=dtype)


def _constant(name: str, value: Any) -> Any:
    if name == "UPCAST":
        return True
    return _DOT_TYPES[value] if isinstance(value, str) else value
