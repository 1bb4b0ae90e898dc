"""A GPU through the CUDA driver's API. cuda-bindings are imported when a device is opened.

CUDA_VISIBLE_DEVICES selects the GPU; the first visible one is used. All devices of a process share the GPU's primary
context. Pinned memory is freed with its last view, which may outlive the device.
"""

import ctypes
import logging
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from ingot.artifact.programs.launch_program import CubinFacts, Kernel
from ingot.errors import EngineError
from ingot.runtime.cuda.driver import calls
from ingot.runtime.cuda.driver.address_range import AddressRange, reserve_range
from ingot.runtime.cuda.driver.calls import DriverCalls, DriverKernel, load_driver, require_driver
from ingot.runtime.cuda.driver.device import Bytes, Device, Event, Given, Graph, Queue, Stream, out_of_memory
from ingot.sizes import format_bytes

_log = logging.getLogger(__name__)
_PORTABLE = 1  # CU_MEMHOSTALLOC_PORTABLE: pinned for every context of the process
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: independent of the legacy stream, which other libraries may use
_TIMING, _NO_TIMING = 0, 2  # CU_EVENT_DEFAULT, CU_EVENT_DISABLE_TIMING
_NAME_BYTES = 256


def open_device() -> Device:
    """Open the first visible GPU. EngineError, naming what is missing, when it cannot be used."""
    return DriverDevice(load_driver())


class DriverDevice:
    """One GPU. Implements `Device`. EngineError for a driver that is too old for the GPU."""

    def __init__(self, driver: Any, ordinal: int = 0) -> None:
        self._driver = driver
        self._call = call = DriverCalls(driver)
        self._gpu = call("finding a GPU", driver.cuDeviceGet, ordinal)
        name: bytes = call("querying the GPU", driver.cuDeviceGetName, _NAME_BYTES, self._gpu)
        self.name = name.partition(b"\0")[0].decode()
        self.sm = 10 * self._attribute("COMPUTE_CAPABILITY_MAJOR") + self._attribute("COMPUTE_CAPABILITY_MINOR")
        version: int = call("querying the driver", driver.cuDriverGetVersion)
        require_driver(version, self.sm, self.name)
        self._context: PrimaryContext | None = PrimaryContext(call, self._gpu)
        self.activate()
        self.total_bytes = self._memory()[1]
        self._addresses: set[int] = set()
        self._ranges: list[AddressRange] = []
        self._streams: list[Stream] = []
        self._events: list[Event] = []
        self._modules: list[Any] = []
        self._graphs: list[Graph] = []
        _log.info("%s: SM %d, %s, CUDA %d", self.name, self.sm, format_bytes(self.total_bytes), version)

    def free_bytes(self) -> int:
        """Memory that can still be allocated."""
        return self._memory()[0]

    def activate(self) -> None:
        """Make the GPU current for the calling thread."""
        if self._context is None:
            raise EngineError("the GPU was closed; load the artifact again")
        self._context.activate()

    def allocate(self, size: int, what: str) -> int:
        """Allocate `size` bytes; return the address."""
        status, pointer = self._driver.cuMemAlloc(size)
        if status == self._driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise out_of_memory(self, size, what)
        if status:
            raise self._call.failure(f"allocating {format_bytes(size)} for {what}", status)
        self._addresses.add(int(pointer))
        return int(pointer)

    def allocate_range(self, fast_bytes: int, slow_bytes: int, what: str) -> int:
        """Allocate device memory, and host memory at the addresses after it; return the first address."""
        found = reserve_range(self._call, self._gpu, fast_bytes, slow_bytes, what)
        self._ranges.append(found)
        return found.address

    def free(self, address: int) -> None:
        """Free what `allocate` returned."""
        self._addresses.remove(address)
        self._call("freeing memory", self._driver.cuMemFree, address)

    def allocate_pinned(self, size: int, what: str) -> Bytes:
        """Allocate page-locked host memory [size]."""
        assert self._context is not None
        return allocate_pinned(self._call, self._context, size, what)

    def make_stream(self) -> Stream:
        """Make a stream."""
        self._streams.append(self._call("making a stream", self._driver.cuStreamCreate, _NON_BLOCKING))
        return self._streams[-1]

    def make_event(self, *, timed: bool = False) -> Event:
        """Make an event."""
        flags = _TIMING if timed else _NO_TIMING
        self._events.append(self._call("making an event", self._driver.cuEventCreate, flags))
        return self._events[-1]

    def record(self, event: Event, stream: Stream) -> None:
        """Mark the work that the stream holds now."""
        self._call("recording an event", self._driver.cuEventRecord, event, stream)

    def wait(self, stream: Stream, event: Event) -> None:
        """Make the stream wait for the event."""
        self._call("waiting for an event", self._driver.cuStreamWaitEvent, stream, event, 0)

    def reached(self, event: Event) -> bool:
        """Whether all that the event marks has run."""
        return self._call.ended("queued work", self._driver.cuEventQuery, event)

    def seconds_between(self, first: Event, last: Event) -> float:
        """Time between two timed events."""
        milliseconds: float = self._call("reading events", self._driver.cuEventElapsedTime, first, last)
        return milliseconds / 1e3

    def wait_on_host(self, event: Event, what: str) -> None:
        """Block the calling thread until the event."""
        self._call(what, self._driver.cuEventSynchronize, event)

    def copy_in(self, target: int, source: Bytes, stream: Stream) -> None:
        """Queue a copy from host to device."""
        copy = self._driver.cuMemcpyHtoDAsync
        self._call("copying to the GPU", copy, target, source.ctypes.data, source.size, stream)

    def copy_rows_in(self, target: int, pitch: int, source: Bytes, stream: Stream) -> None:
        """Queue a copy of [rows, width] bytes to rows `pitch` bytes apart."""
        copy = self._driver.CUDA_MEMCPY2D()
        copy.srcMemoryType = self._driver.CUmemorytype.CU_MEMORYTYPE_HOST
        copy.srcHost = source.ctypes.data
        copy.srcPitch = source.shape[1]
        copy.dstMemoryType = self._driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
        copy.dstDevice = target
        copy.dstPitch = pitch
        copy.WidthInBytes = source.shape[1]
        copy.Height = source.shape[0]
        self._call("copying rows to the GPU", self._driver.cuMemcpy2DAsync, copy, stream)

    def copy_out(self, target: Bytes, source: int, stream: Stream) -> None:
        """Queue a copy from device to host."""
        copy = self._driver.cuMemcpyDtoHAsync
        self._call("copying from the GPU", copy, target.ctypes.data, source, target.size, stream)

    def copy(self, target: int, source: int, size: int, stream: Stream) -> None:
        """Queue a copy within the device."""
        self._call("copying within the GPU", self._driver.cuMemcpyDtoDAsync, target, source, size, stream)

    def clear(self, address: int, size: int, stream: Stream) -> None:
        """Queue a fill with zeros."""
        self._call("clearing memory", self._driver.cuMemsetD8Async, address, 0, size, stream)

    def load_kernel(self, cubin: Bytes, kernel: Kernel, facts: CubinFacts) -> DriverKernel:
        """Load a kernel from its cubin."""
        loaded = calls.load_kernel(self._call, self._gpu, cubin, kernel, facts)
        self._modules.append(loaded.module)
        return loaded

    def bind(self, kernel: DriverKernel, grid: tuple[int, int, int], arguments: Sequence[Given], node: str) -> Queue:
        """Bind a launch to fixed arguments."""
        return calls.bind(self._call, kernel, grid, arguments, node)

    def capture(self, stream: Stream, work: Queue) -> Graph:
        """Capture a graph of what `work` queues."""
        self._graphs.append(calls.capture(self._call, stream, work))
        return self._graphs[-1]

    def replay(self, graph: Graph, stream: Stream) -> None:
        """Launch a graph."""
        self._call("launching a graph", self._driver.cuGraphLaunch, graph, stream)

    def synchronize(self, what: str) -> None:
        """Wait for all streams."""
        self._call(what, self._driver.cuCtxSynchronize)

    def close(self) -> None:
        """Wait, and free everything."""
        if self._context is None:
            return
        with suppress(EngineError):  # steps that failed have raised it to their callers
            self.activate()
            self.synchronize("closing")
        if self._call.lost is None:
            self._free_all()
        self._context = None

    def _free_all(self) -> None:
        driver = self._driver
        made = (
            (driver.cuGraphExecDestroy, self._graphs),
            (driver.cuModuleUnload, self._modules),
            (driver.cuEventDestroy, self._events),
            (driver.cuStreamDestroy, self._streams),
            (driver.cuMemFree, self._addresses),
        )
        for destroy, handles in made:
            for handle in handles:
                destroy(handle)
            handles.clear()
        for one in self._ranges:
            one.close()
        self._ranges.clear()

    def _attribute(self, name: str) -> int:
        attribute = getattr(self._driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        value: int = self._call("querying the GPU", self._driver.cuDeviceGetAttribute, attribute, self._gpu)
        return value

    def _memory(self) -> tuple[int, int]:
        status, free, total = self._driver.cuMemGetInfo()
        if status:
            raise self._call.failure("querying the GPU's memory", status)
        return int(free), int(total)


class PrimaryContext:
    """The GPU's context that the whole process shares; released with the last reference to this object."""

    def __init__(self, call: DriverCalls, gpu: Any) -> None:
        self._call = call
        self.handle = call("opening the GPU", call.driver.cuDevicePrimaryCtxRetain, gpu)
        weakref.finalize(self, call.driver.cuDevicePrimaryCtxRelease, gpu)

    def activate(self) -> None:
        """Make it current for the calling thread."""
        self._call("selecting the GPU", self._call.driver.cuCtxSetCurrent, self.handle)


def allocate_pinned(call: DriverCalls, context: PrimaryContext, size: int, what: str) -> Bytes:
    """Allocate page-locked memory [size], freed with its last view. EngineError when the host has none left."""
    driver = call.driver
    status, address = driver.cuMemHostAlloc(size, _PORTABLE)
    if status == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
        raise EngineError(
            f"{what} takes {format_bytes(size)} of page-locked host memory, which the system refuses; ask for less "
            "(kv_host_bytes, max_batch_tokens), or raise the container's memory limit"
        )
    if status:
        raise call.failure(f"page-locking {format_bytes(size)} for {what}", status)
    memory = (ctypes.c_uint8 * size).from_address(int(address))
    weakref.finalize(memory, _free_pinned, driver, context, int(address))
    array: Bytes = np.ctypeslib.as_array(memory)
    return array


def _free_pinned(driver: Any, context: PrimaryContext, address: int) -> None:
    """Free, ignoring errors: the context may be lost, or the process about to end."""
    driver.cuCtxSetCurrent(context.handle)
    driver.cuMemFreeHost(address)
