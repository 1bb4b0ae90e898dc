"""Calls of the CUDA driver through cuda-bindings: what they fail with, in words that help.

A bad memory access or a trap in a kernel spoils the process's context: every later call fails the same way. The first
failure says so; the device then refuses what it is asked without calling the driver.

Kernels and graphs through the CUDA driver.

Triton's kernels take their arguments in order and two more pointers, to scratch memory that none of ours has.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from ingot.artifact.launch_program import CubinFacts, Kernel
from ingot.errors import EngineError
from ingot.runtime.cuda.device import Bytes, Given, Queue, Stream

# The oldest driver, as CUDA's version, for each major SM. Kernels are compiled by a CUDA 12, whose code any driver of
# CUDA 12 takes (CUDA Compatibility, minor version compatibility) that knows the card: SM 120 came with 12.8.
_OLDEST = {8: 12000, 9: 12000, 12: 12080}
_FIRST_DRIVERS = {12000: "525.60", 12080: "570.26"}

_SPOILING = frozenset(
    f"CUDA_ERROR_{name}"
    for name in (
        "ILLEGAL_ADDRESS",
        "LAUNCH_FAILED",
        "ILLEGAL_INSTRUCTION",
        "MISALIGNED_ADDRESS",
        "INVALID_ADDRESS_SPACE",
        "INVALID_PC",
        "HARDWARE_STACK_ERROR",
        "ASSERT",
        "LAUNCH_TIMEOUT",
        "ECC_UNCORRECTABLE",
        "NVLINK_UNCORRECTABLE",
        "EXTERNAL_DEVICE",
        "CONTAINED",
        "TENSOR_MEMORY_LEAK",
    )
)

_ADVICE = {
    "CUDA_ERROR_OUT_OF_MEMORY": "the card is full; ask for fewer KV blocks (kv_blocks or kv_bytes)",
    "CUDA_ERROR_NO_DEVICE": "no NVIDIA card is visible; see nvidia-smi and CUDA_VISIBLE_DEVICES",
    "CUDA_ERROR_INVALID_DEVICE": "no NVIDIA card is visible; see nvidia-smi and CUDA_VISIBLE_DEVICES",
    "CUDA_ERROR_STUB_LIBRARY": "libcuda.so.1 is the toolkit's stub, not the driver's; take it off LD_LIBRARY_PATH",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "driver and libcuda are of different versions; restart the machine",
    "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE": "CUDA's compatibility package is not for this card; update the driver",
    "CUDA_ERROR_SYSTEM_NOT_READY": "the driver waits for the fabric manager; start nvidia-fabricmanager",
    "CUDA_ERROR_DEVICE_UNAVAILABLE": "another process has the card for itself; end it, or choose another card",
    "CUDA_ERROR_NO_BINARY_FOR_GPU": "the kernel was compiled for another card; build the artifact for this one",
    "CUDA_ERROR_INVALID_IMAGE": "the driver does not take the compiled kernel: update it, or build the artifact again",
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION": "the driver is older than the compiled kernel; update it",
    "CUDA_ERROR_ECC_UNCORRECTABLE": "the card's memory is damaged; see nvidia-smi -q -d ECC",
}


def load_driver() -> Any:
    """The module cuda.bindings.driver, initialised. EngineError without bindings, driver or card."""
    try:
        driver = import_module("cuda.bindings.driver")
    except ImportError as error:
        raise EngineError(
            f"running on a card needs cuda-bindings ({error}): pip install 'ingot[cuda]', or build for a CPU target"
        ) from error
    try:
        (status,) = driver.cuInit(0)
    except RuntimeError as error:  # libcuda.so.1 is not there, or lacks what the bindings look for
        raise EngineError(
            f"the CUDA driver cannot be loaded ({error}); install NVIDIA's driver on a machine with a card, or build "
            "for a CPU target"
        ) from error
    if status != driver.CUresult.CUDA_SUCCESS:
        raise EngineError(f"no card can be used: {describe(driver, status)}")
    return driver


def require_driver(version: int, sm: int, card: str) -> None:
    """EngineError for a driver (as CUDA's version, 12040 for 12.4) too old to take code for the card's SM."""
    oldest = _OLDEST.get(sm // 10, max(_OLDEST.values()))
    if version < oldest:
        raise EngineError(
            f"the driver speaks CUDA {_dotted(version)}; kernels for {card} (SM {sm}) need CUDA {_dotted(oldest)}: "
            f"update NVIDIA's driver to {_FIRST_DRIVERS[oldest]} or newer"
        )


def describe(driver: Any, status: Any) -> str:
    """A CUresult's name and text, and what to do where that is known."""
    name = str(getattr(status, "name", status))
    _, text = driver.cuGetErrorString(status)
    said = f"{name} ({text.decode()})" if text else name
    return f"{said}: {_ADVICE[name]}" if name in _ADVICE else said


class Calls:
    """Calls driver functions and raises what they return. One for each device."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        self.spoilt: str | None = None  # the first failure that no call survives

    def __call__(self, what: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """function(*arguments)'s result; EngineError, beginning with `what`, when it fails."""
        if self.spoilt:
            raise EngineError(f"{what}: the card's context was lost before ({self.spoilt}); start the process again")
        try:
            status, *results = function(*arguments)
        except RuntimeError as error:  # the bindings look a function up when it is first called
            raise EngineError(
                f"{what}: the driver lacks what cuda-bindings ask of it ({error}); update NVIDIA's driver, or install "
                "cuda-bindings of its CUDA version: pip install 'cuda-bindings<13' for CUDA 12"
            ) from error
        if status:
            raise self.failure(what, status)
        return results[0] if results else None

    def failure(self, what: str, status: Any) -> EngineError:
        """The error for a status; remembers one that spoils the context."""
        said = describe(self.driver, status)
        if str(getattr(status, "name", status)) not in _SPOILING:
            return EngineError(f"{what}: {said}")
        self.spoilt = f"{what}: {said}"
        return EngineError(
            f"{what}: {said}; the card's context is lost with it: start the process again, with INGOT_CUDA_BLOCKING=1 "
            "to learn which kernel it was"
        )


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


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
