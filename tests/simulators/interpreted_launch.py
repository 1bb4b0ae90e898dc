"""A launch from the bytes of its parameters, as the driver gets them, run by Triton's interpreter."""

import ctypes
import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch

from ingot.artifact.launch_program import Kernel
from tests.simulators.interpreted_device import kernel_function
from tests.simulators.interpreted_kernels import TORCH_TYPES

_NUMBERS: dict[str, Any] = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}


def launched(code: bytes, x: int, y: int, z: int, threads: int, shared: int, parameters: Any) -> None:
    """Run a kernel. Two pointers to scratch memory follow its parameters; they must be null."""
    kernel = Kernel.model_validate_json(code.split(b"\n", 2)[2])
    count = len(kernel.types)
    arguments = [_argument(kind, parameters[index]) for index, kind in enumerate(kernel.types)]
    scratch = [ctypes.c_uint64.from_address(parameters[count + index]).value for index in range(2)]
    assert scratch == [0, 0]
    assert threads == 32 * kernel.num_warps
    function, constants = kernel_function(kernel)
    function[x, y, z](*arguments, **constants)


def _argument(kind: str, place: int) -> Any:
    if not kind.startswith("*"):
        return _NUMBERS[kind].from_address(place).value
    address, dtype = ctypes.c_uint64.from_address(place).value, TORCH_TYPES[kind[1:]]
    if address == 0:
        return torch.zeros(1, dtype=dtype)
    memory = (ctypes.c_uint8 * dtype.itemsize).from_address(address)  # the interpreter goes by addresses, not bounds
    return torch.frombuffer(memory, dtype=dtype)
