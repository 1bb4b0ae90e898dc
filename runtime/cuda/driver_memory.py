"""The card's primary context, and pinned memory that lives as long as anybody looks at it."""

import ctypes
import weakref
from typing import Any

import numpy as np

from ingot.errors import EngineError
from ingot.runtime.cuda.device import Bytes, mebibytes
from ingot.runtime.cuda.driver_calls import Calls

_PORTABLE = 1  # CU_MEMHOSTALLOC_PORTABLE: pinned for every context of the process


class PrimaryContext:
    """The context that all of a process shares on a card; given back when nobody holds on to this any more."""

    def __init__(self, call: Calls, card: Any) -> None:
        self._call = call
        self.handle = call("opening the card", call.driver.cuDevicePrimaryCtxRetain, card)
        weakref.finalize(self, call.driver.cuDevicePrimaryCtxRelease, card)

    def activate(self) -> None:
        """Make it the calling thread's."""
        self._call("choosing the card", self._call.driver.cuCtxSetCurrent, self.handle)


def allocate_pinned(call: Calls, context: PrimaryContext, size: int, what: str) -> Bytes:
    """Page-locked memory [size]; freed with the last view of it. EngineError when the host has none left."""
    driver = call.driver
    status, address = driver.cuMemHostAlloc(size, _PORTABLE)
    if status == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
        raise EngineError(
            f"{what} takes {mebibytes(size)} of page-locked host memory, which the system refuses; ask for fewer "
            "blocks in host memory or a smaller max_batch_tokens, or raise the container's memory limit"
        )
    if status:
        raise call.failure(f"page-locking {mebibytes(size)} for {what}", status)
    memory = (ctypes.c_uint8 * size).from_address(int(address))
    weakref.finalize(memory, _free_pinned, driver, context, int(address))
    array: Bytes = np.ctypeslib.as_array(memory)
    return array


def _free_pinned(driver: Any, context: PrimaryContext, address: int) -> None:
    """Free, whatever the context's state: after a failure, or at the process's end, there is nobody left to tell."""
    driver.cuCtxSetCurrent(context.handle)
    driver.cuMemFreeHost(address)
