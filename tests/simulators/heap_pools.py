"""Memory of the CPU engine on the heap, each array in a block of its own, so that a sanitizer sees what exceeds one.

    pytest -p tests.simulators.heap_pools ...    for all tests of a run

The engine maps pools and weights, and gives the buffers of a step parts of one arena: what a kernel does after the end
of an array is then mapped memory too. With `place_on_heap`, the pools, each tensor of the weights and each buffer of
the arena are blocks of the heap, which end where the arrays do.
"""

import ctypes
import mmap
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ingot.artifact.programs.operation_row import LANES, RowsOf, View
from ingot.artifact.programs.stages import LOGITS
from ingot.artifact.safetensors import MappedTensors
from ingot.runtime.cpu import host_blocks, kv_pool, state_pool
from ingot.runtime.cpu.native import program
from ingot.runtime.cpu.native.program_binding import FLOAT_BYTES, BoundOperations
from ingot.runtime.cpu.native.structures import ViewAt
from ingot.sizes import round_up

SHORTENED = ("pool", "states", "weights", "arena")
_ALIGNMENT = 64  # of tiles, and of rows of the arena
_LEFT_BYTES = 64  # of a shortened array

MapZeros = Callable[..., Any]


def pytest_configure() -> None:
    """Place the memory of all tests of a run on the heap."""
    place_on_heap()


def place_on_heap(shortened: str | None = None) -> pytest.MonkeyPatch:
    """Place the memory of the engines that this process makes from now on on the heap; return what undoes it.

    shortened   one of SHORTENED: AddressSanitizer allows only the first bytes of its arrays, so that steps exceed them
    """
    patch, map_zeros = pytest.MonkeyPatch(), kv_pool.map_zeros
    for module, kind in ((kv_pool, "pool"), (state_pool, "states"), (program, "the arena as a whole")):
        patch.setattr(module, "map_zeros", _map_on_heap(map_zeros, kind == shortened))
    anonymous = {name: getattr(mmap, name) for name in ("MAP_PRIVATE", "MAP_ANONYMOUS")}
    patch.setattr(host_blocks, "mmap", SimpleNamespace(mmap=lambda _, size, __: _allocate(size), **anonymous))
    patch.setattr(MappedTensors, "view", _view_of_copy(MappedTensors.view, shortened == "weights"))
    patch.setattr(BoundOperations, "_view", _view_of_own_block(shortened == "arena"))
    return patch


def _allocate(num_bytes: int, shortened: bool = False) -> "ctypes.Array[ctypes.c_char]":
    """Zeros that end with their block of the heap."""
    libc, at = ctypes.CDLL(None), ctypes.c_void_p()
    problem = libc.posix_memalign(ctypes.byref(at), ctypes.c_size_t(_ALIGNMENT), ctypes.c_size_t(num_bytes))
    if problem:
        raise OSError(problem, f"{num_bytes} bytes of the heap")
    assert at.value is not None
    memory = (ctypes.c_char * num_bytes).from_address(at.value)
    ctypes.memset(memory, 0, num_bytes)
    if shortened and num_bytes > _LEFT_BYTES:
        libc.__asan_poison_memory_region(
            ctypes.c_void_p(at.value + _LEFT_BYTES), ctypes.c_size_t(num_bytes - _LEFT_BYTES)
        )
    weakref.finalize(memory, libc.free, at).atexit = False
    return memory


def _map_on_heap(map_zeros: MapZeros, shortened: bool) -> MapZeros:
    def map_on_heap(num_bytes: int, what: str, remedy: str, *, is_replaced: bool = False) -> Any:
        if is_replaced:  # a file is mapped there: not on the heap
            return map_zeros(num_bytes, what, remedy, is_replaced=True)
        map_zeros(num_bytes, what, remedy)  # refuses what the machine lacks
        return _allocate(num_bytes, shortened)

    return map_on_heap


def _view_of_copy(view: Callable[..., NDArray[np.uint8]], shortened: bool) -> Callable[..., NDArray[np.uint8]]:
    def view_of_copy(*arguments: Any) -> NDArray[np.uint8]:
        content = view(*arguments)
        if content.size == 0:
            return content
        memory = _allocate(content.size, shortened)
        ctypes.memmove(memory, content.ctypes.data, min(content.size, _LEFT_BYTES) if shortened else content.size)
        return np.frombuffer(memoryview(memory), np.uint8)

    return view_of_copy


def _view_of_own_block(shortened: bool) -> Callable[[BoundOperations, View, RowsOf], ViewAt]:
    def view_of_own_block(self: BoundOperations, view: View, rows: RowsOf) -> ViewAt:
        buffer = self._program.buffers[view.buffer]
        if view.buffer == LOGITS:
            return ViewAt(None, buffer.columns, False)
        blocks: dict[str, Any] = self.__dict__.setdefault("_blocks", {})
        stride = round_up(buffer.columns, LANES)
        if view.buffer not in blocks:
            blocks[view.buffer] = _allocate(self._rows * stride * FLOAT_BYTES, shortened)
        at = ctypes.addressof(blocks[view.buffer]) + view.column * FLOAT_BYTES
        return ViewAt(at, stride, buffer.rows != rows)

    return view_of_own_block
