"""Calls of the CUDA driver through cuda-bindings, with errors that say what to do; kernels and graphs.

A bad memory access or a trap in a kernel corrupts the process's context: every later call fails the same way. The first
failure says so; later calls are refused without calling the driver.

Triton's kernels take their arguments in order, then two pointers to scratch memory, which none of ours uses.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from ingot.artifact.programs.cubin_parameters import require_parameters
from ingot.artifact.programs.launch_program import CubinFacts, Kernel
from ingot.errors import EngineError
from ingot.runtime.cuda.driver.device import Bytes, Given, Queue, Stream
from ingot.settings import dependent_launches
from ingot.version import install_command

# The oldest driver, as its CUDA version, for each major SM. Kernels are compiled by CUDA 12, and any driver of CUDA 12
# runs that code (CUDA Compatibility, minor version compatibility) if it supports the GPU: SM 120 came with 12.8.
_OLDEST = {8: 12000, 9: 12000, 12: 12080}
_FIRST_DRIVERS = {12000: "525.60", 12080: "570.26"}

_FATAL = frozenset(
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
    "CUDA_ERROR_OUT_OF_MEMORY": "the GPU's memory is full; ask for fewer KV blocks (kv_blocks or kv_bytes)",
    "CUDA_ERROR_NO_DEVICE": "no NVIDIA GPU is visible; see nvidia-smi and CUDA_VISIBLE_DEVICES",
    "CUDA_ERROR_INVALID_DEVICE": "no NVIDIA GPU is visible; see nvidia-smi and CUDA_VISIBLE_DEVICES",
    "CUDA_ERROR_STUB_LIBRARY": "libcuda.so.1 is the toolkit's stub, not the driver's; take it off LD_LIBRARY_PATH",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "driver and libcuda have different versions; restart the machine",
    "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE": "CUDA's compatibility package lacks this GPU; update the driver",
    "CUDA_ERROR_SYSTEM_NOT_READY": "the driver waits for the fabric manager; start nvidia-fabricmanager",
    "CUDA_ERROR_DEVICE_UNAVAILABLE": "another process uses the GPU exclusively; end it, or choose another GPU",
    "CUDA_ERROR_NO_BINARY_FOR_GPU": "the kernel was compiled for another GPU; build the artifact for this one",
    "CUDA_ERROR_INVALID_IMAGE": "the driver rejects the compiled kernel: update it, or build the artifact again",
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION": "the driver is older than the compiled kernel; update it",
    "CUDA_ERROR_ECC_UNCORRECTABLE": "the GPU's memory is damaged; see nvidia-smi -q -d ECC",
}
_SCRATCH: Sequence[Given] = (("*u8", 0), ("*u8", 0))
_WARP = 32
_STATIC_SHARED_BYTES = 48 * 1024  # a kernel's limit unless an attribute raises it (Programming Guide)
_NUMBERS: dict[str, Callable[[Any], Any]] = {
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "fp32": ctypes.c_float,
}


def load_driver() -> Any:
    """Import and initialize cuda.bindings.driver. EngineError without bindings, driver or GPU."""
    try:
        driver = import_module("cuda.bindings.driver")
    except ImportError as error:
        raise EngineError(
            f"running on a GPU needs cuda-bindings ({error}): {install_command('cuda')}, or build for a CPU target"
        ) from error
    try:
        (status,) = driver.cuInit(0)
    except RuntimeError as error:  # libcuda.so.1 is missing, or lacks a function that the bindings need
        raise EngineError(
            f"the CUDA driver cannot be loaded ({error}); install NVIDIA's driver on a machine with a GPU, or build "
            "for a CPU target"
        ) from error
    if status != driver.CUresult.CUDA_SUCCESS:
        raise EngineError(f"no GPU can be used: {describe(driver, status)}")
    return driver


def require_driver(version: int, sm: int, gpu: str) -> None:
    """Raise EngineError for a driver (as its CUDA version, 12040 for 12.4) too old to run code for the GPU's SM."""
    oldest = _OLDEST.get(sm // 10, max(_OLDEST.values()))
    if version < oldest:
        raise EngineError(
            f"the driver supports CUDA {_dotted(version)}; kernels for {gpu} (SM {sm}) need CUDA {_dotted(oldest)}: "
            f"update NVIDIA's driver to {_FIRST_DRIVERS[oldest]} or newer"
        )


def describe(driver: Any, status: Any) -> str:
    """Format a CUresult: its name, its text, and what to do about it."""
    name = str(getattr(status, "name", status))
    _, text = driver.cuGetErrorString(status)
    said = f"{name} ({text.decode()})" if text else name
    return f"{said}: {_ADVICE[name]}" if name in _ADVICE else said


class DriverCalls:
    """Calls driver functions and raises their errors. One for each device."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        self.lost: str | None = None  # the failure that corrupted the context

    def __call__(self, what: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of function(*arguments). EngineError, beginning with `what`, when it fails."""
        status, *results = self._called(what, function, arguments)
        if status:
            raise self.failure(what, status)
        return results[0] if results else None

    def ended(self, what: str, query: Callable[..., Any], *arguments: Any) -> bool:
        """Whether the work that a query is about has ended. EngineError when it failed."""
        (status,) = self._called(what, query, arguments)
        if status == self.driver.CUresult.CUDA_ERROR_NOT_READY:
            return False
        if status:
            raise self.failure(what, status)
        return True

    def _called(self, what: str, function: Callable[..., Any], arguments: Sequence[Any]) -> tuple[Any, ...]:
        if self.lost:
            raise EngineError(f"{what}: the GPU's context was lost before ({self.lost}); start the process again")
        try:
            result: tuple[Any, ...] = function(*arguments)
        except RuntimeError as error:  # the bindings resolve a function when it is first called
            raise EngineError(
                f"{what}: the driver lacks a function that cuda-bindings need ({error}); update NVIDIA's driver, or "
                "install cuda-bindings of its CUDA version: pip install 'cuda-bindings<13' for CUDA 12"
            ) from error
        return result

    def failure(self, what: str, status: Any) -> EngineError:
        """Make the error for a status; remember it when the context is lost."""
        said = describe(self.driver, status)
        if str(getattr(status, "name", status)) not in _FATAL:
            return EngineError(f"{what}: {said}")
        self.lost = f"{what}: {said}"
        return EngineError(
            f"{what}: {said}; the GPU's context is lost with it: start the process again, with INGOT_CUDA_BLOCKING=1 "
            "to find the kernel"
        )


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


@dataclass(frozen=True)
class DriverKernel:
    """A kernel on the GPU."""

    name: str
    module: Any
    function: Any
    threads: int
    shared_bytes: int
    is_dependent: bool = False


def load_kernel(call: DriverCalls, gpu: Any, cubin: Bytes, kernel: Kernel, facts: CubinFacts) -> DriverKernel:
    """Load a kernel from its cubin, and allow it the shared memory that it was compiled for.

    ArtifactError for a cubin that takes other parameters than a launch passes.
    """
    require_parameters(cubin.tobytes(), kernel, facts.symbol)
    driver, what = call.driver, f"loading the kernel {kernel.name}"
    module = call(what, driver.cuModuleLoadData, cubin.ctypes.data)
    function = call(what, driver.cuModuleGetFunction, module, facts.symbol.encode())
    # The driver loads code when a function is first queried or launched, which must not happen during a capture.
    call(what, driver.cuFuncGetAttribute, driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NUM_REGS, function)
    if facts.shared_bytes > _STATIC_SHARED_BYTES:
        _allow_shared(call, gpu, function, kernel, facts.shared_bytes)
    is_dependent = kernel.is_dependent and dependent_launches()
    return DriverKernel(kernel.name, module, function, _WARP * kernel.num_warps, facts.shared_bytes, is_dependent)


def _allow_shared(call: DriverCalls, gpu: Any, function: Any, kernel: Kernel, size: int) -> None:
    driver, what = call.driver, f"shared memory of the kernel {kernel.name}"
    limit = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    most = call(what, driver.cuDeviceGetAttribute, limit, gpu)
    if size > most:
        raise EngineError(
            f"the kernel {kernel.name} needs {size} bytes of shared memory, and the GPU gives a block {most}; build "
            "with smaller tiles (gpu.tiles), or for this GPU's own SM"
        )
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    call(what, driver.cuFuncSetAttribute, function, attribute, size)


def bind(
    call: DriverCalls, kernel: DriverKernel, grid: tuple[int, int, int], arguments: Sequence[Given], node: str
) -> Queue:
    """Bind a launch to its arguments, packed in memory of its own.

    A dependent one may start before the kernel that is queued before it ends, also where a graph replays both; after
    anything else than a kernel it starts as usual.
    """
    values = [_NUMBERS.get(kind, ctypes.c_uint64)(value) for kind, value in (*arguments, *_SCRATCH)]
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    address, block = ctypes.addressof(pointers), (kernel.threads, 1, 1)
    launch, launch_ex = call.driver.cuLaunchKernel, call.driver.cuLaunchKernelEx if kernel.is_dependent else None
    config = _dependent_config(call.driver, kernel, grid) if kernel.is_dependent else None

    def queue(stream: Stream, kept: object = (values, pointers)) -> None:
        if config is not None and launch_ex is not None:
            config.hStream = stream
            (status,) = launch_ex(config, kernel.function, address, 0)
        else:
            (status,) = launch(kernel.function, *grid, *block, kernel.shared_bytes, stream, address, 0)
        if status:
            raise call.failure(f"launching {kernel.name} for {node!r}, grid {grid}", status)

    return queue


def _dependent_config(driver: Any, kernel: DriverKernel, grid: tuple[int, int, int]) -> Any:
    """The configuration of a programmatic dependent launch; its stream is set when it is queued."""
    attribute, config = driver.CUlaunchAttribute(), driver.CUlaunchConfig()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = kernel.threads, 1, 1
    config.sharedMemBytes = kernel.shared_bytes
    config.attrs, config.numAttrs = [attribute], 1
    return config


def capture(call: DriverCalls, stream: Stream, work: Queue) -> Any:
    """Capture what `work` queues as a graph, instantiate it and upload it to the GPU."""
    driver, what = call.driver, "capturing a graph"
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    call(what, driver.cuStreamBeginCapture, stream, mode)
    try:
        work(stream)
    except BaseException:
        status, unfinished = driver.cuStreamEndCapture(stream)  # ends the capture, so that the stream can be used again
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
