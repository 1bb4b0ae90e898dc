"""Kernels and graphs through the CUDA driver.

Triton's kernels take their arguments in order and two more pointers, to scratch memory that none of ours has.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ingot.artifact.launch_program import CubinFacts, Kernel
from ingot.errors import EngineError
from ingot.runtime.cuda.device import Bytes, Given, Queue, Stream
from ingot.runtime.cuda.driver_calls import Calls

_SCRATCH: Sequence[Given] = (("*u8", 0), ("*u8", 0))
_WARP = 32
_STATIC_SHARED_BYTES = 48 * 1024  # what a kernel may have without being asked for more (Programming Guide)
_NUMBERS: dict[str, Callable[[Any], Any]] = {
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "fp32": ctypes.c_float,
}


@dataclass(frozen=True)
class DriverKernel:
    """A kernel on the card."""

    name: str
    module: Any
    function: Any
    threads: int
    shared_bytes: int


def load_kernel(call: Calls, card: Any, cubin: Bytes, kernel: Kernel, facts: CubinFacts) -> DriverKernel:
    """A kernel from its cubin, allowed the shared memory that it was compiled for."""
    driver, what = call.driver, f"loading the kernel {kernel.name}"
    module = call(what, driver.cuModuleLoadData, cubin.ctypes.data)
    function = call(what, driver.cuModuleGetFunction, module, facts.symbol.encode())
    # The driver loads code when a function is first looked into or launched, which must not happen within a capture.
    call(what, driver.cuFuncGetAttribute, driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NUM_REGS, function)
    if facts.shared_bytes > _STATIC_SHARED_BYTES:
        _allow_shared(call, card, function, kernel, facts.shared_bytes)
    return DriverKernel(kernel.name, module, function, _WARP * kernel.num_warps, facts.shared_bytes)


def _allow_shared(call: Calls, card: Any, function: Any, kernel: Kernel, size: int) -> None:
    driver, what = call.driver, f"shared memory of the kernel {kernel.name}"
    limit = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    most = call(what, driver.cuDeviceGetAttribute, limit, card)
    if size > most:
        raise EngineError(
            f"the kernel {kernel.name} needs {size} bytes of shared memory, and the card gives a block {most}; build "
            "with smaller tiles (gpu.tiles), or for this card's own SM"
        )
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    call(what, driver.cuFuncSetAttribute, function, attribute, size)


def bind(call: Calls, kernel: DriverKernel, grid: tuple[int, int, int], arguments: Sequence[Given], node: str) -> Queue:
    """A launch whose arguments lie packed in memory of its own."""
    values = [_NUMBERS.get(kind, ctypes.c_uint64)(value) for kind, value in (*arguments, *_SCRATCH)]
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    address, launch, block = ctypes.addressof(pointers), call.driver.cuLaunchKernel, (kernel.threads, 1, 1)

    def queue(stream: Stream, kept: object = (values, pointers)) -> None:
        (status,) = launch(kernel.function, *grid, *block, kernel.shared_bytes, stream, address, 0)
        if status:
            raise call.failure(f"launching {kernel.name} for {node!r}, grid {grid}", status)

    return queue


def capture(call: Calls, stream: Stream, work: Queue) -> Any:
    """A graph of what `work` queues, instantiated and brought to the card."""
    driver, what = call.driver, "capturing a graph"
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    call(what, driver.cuStreamBeginCapture, stream, mode)
    try:
        work(stream)
    except BaseException:
        status, unfinished = driver.cuStreamEndCapture(stream)  # the stream must be of use again
        if not status and int(unfinished):
            driver.cuGraphDestroy(unfinished)
        raise
    graph = call(what, driver.cuStreamEndCapture, stream)
    try:
        ready = call(what, driver.cuGraphInstantiate, graph, 0)
    finally:
        driver.cuGraphDestroy(graph)
    call(what, driver.cuGraphUpload, ready, stream)
    return ready
