"""Recurrent layers between onnxruntime's segments: the C kernels (recurrent.c, by ctypes), else numpy.

The backend is that of attention (attention.py).
"""

from collections.abc import Callable
from ctypes import POINTER, Structure, addressof, byref
from typing import Protocol

import numpy as np

from ingot.artifact.programs.recurrent import RecurrentFacts
from ingot.runtime.cpu.native import abi
from ingot.runtime.cpu.native.attention import attention_backend
from ingot.runtime.cpu.native.library import native_library
from ingot.runtime.cpu.native.numpy_recurrence import NumpyRecurrence
from ingot.runtime.cpu.native.structures import (
    OPERATIONS,
    OperationAt,
    Sequences,
    ViewAt,
)
from ingot.runtime.cpu.recurrent_operands import RecurrentOperands
from ingot.runtime.cpu.state_pool import StatePool
from ingot.runtime.forward_batch import ForwardBatch, Int32Array


class Recurrence(Protocol):
    """Recurrent layers over one pool of states: `begin` once per step, then each bound call once."""

    def begin(self, batch: ForwardBatch) -> None:
        """Set the step's sequences."""
        ...

    def bind(self, facts: RecurrentFacts, operands: RecurrentOperands) -> Callable[[], None]:
        """Return the call that reads and replaces the states of the step's sequences, and fills the output."""
        ...


class NativeRecurrence:
    """Recurrent layers by the C kernels. Implements `Recurrence`."""

    def __init__(self, pool: StatePool, num_threads: int) -> None:
        library = native_library()
        assert library is not None
        self._call = library.recurrent_layer
        self._call.argtypes, self._call.restype = (POINTER(OperationAt), POINTER(Sequences)), None
        self._pool = pool
        self._sequences = Sequences(threads=num_threads)
        self._held: tuple[Int32Array, ...] = ()

    def begin(self, batch: ForwardBatch) -> None:
        """Set the step's sequences, for every call until the next `begin`."""
        assert batch.state_slots is not None
        arrays = (batch.query_starts, batch.context_lens, batch.state_slots)
        self._held = tuple(np.ascontiguousarray(array, np.int32) for array in arrays)  # the kernels keep the addresses
        assert 0 <= self._held[2].min() <= self._held[2].max() < self._pool.num_blocks
        sequences = self._sequences
        sequences.query_starts, sequences.context_lens, sequences.slots = (a.ctypes.data for a in self._held)
        sequences.num_sequences = len(self._held[2])

    def bind(self, facts: RecurrentFacts, operands: RecurrentOperands) -> Callable[[], None]:
        """Return the call that runs the layer on these buffers."""
        kind, bound = describe(facts, self._pool)
        for name, array in operands.values.items():
            assert array.strides[1] == array.itemsize == 4
            setattr(bound, name, ViewAt(array.ctypes.data, array.strides[0] // 4, False))
        for name, array in operands.tensors.items():
            assert array.flags.c_contiguous
            setattr(bound, name, array.ctypes.data)
        operation = OperationAt(kind, addressof(bound))
        call, operation_at, sequences_at = self._call, byref(operation), byref(self._sequences)

        def run(_held: tuple[object, ...] = (operation, bound, operands, self)) -> None:
            call(operation_at, sequences_at)

        return run


def describe(facts: RecurrentFacts, pool: StatePool) -> tuple[int, Structure]:
    """The kind and structure of a layer with its sizes and states, without operands."""
    bound = OPERATIONS[abi.c_name(facts.operation)](states=pool.part(facts).ctypes.data, state_stride=pool.stride)
    abi.set_numbers(bound, facts)
    return abi.OPERATION[facts.operation], bound


def make_recurrence(pool: StatePool, num_threads: int) -> Recurrence:
    """Make the recurrent layers over `pool` with the backend in use."""
    if attention_backend() == "numpy":
        return NumpyRecurrence(pool)
    return NativeRecurrence(pool, num_threads)
