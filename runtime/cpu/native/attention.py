"""Attention between onnxruntime's segments: the C kernel (paged_attention.c, by ctypes) where it was built, else numpy.

The backend is chosen and logged once per process; INGOT_ATTENTION=numpy forces numpy, for comparisons or when the C
kernel may be at fault.
"""

import logging
from collections.abc import Callable
from ctypes import byref
from functools import cache
from typing import Protocol

import numpy as np

from ingot import settings
from ingot.artifact import AttentionStep, KVGeometry
from ingot.artifact.programs.cpu_program import Arithmetic
from ingot.errors import EngineError
from ingot.runtime.cpu.attention_operands import AttentionOperands, RotaryOperands
from ingot.runtime.cpu.kv_pool import KVPool
from ingot.runtime.cpu.kv_precision import kind_of
from ingot.runtime.cpu.native import abi
from ingot.runtime.cpu.native.library import native_library
from ingot.runtime.cpu.native.numpy_attention import NumpyAttention
from ingot.runtime.cpu.native.structures import Layer, NativeStep
from ingot.runtime.forward_batch import FloatArray, ForwardBatch, Int32Array

_log = logging.getLogger(__name__)


def isa_in_use() -> str:
    """Instruction set that the library runs: avx512-bf16, avx512, avx2 or baseline."""
    library = native_library()
    assert library is not None
    name: bytes = library.paged_attention_isa()
    return name.decode()


def use_isa(name: str) -> bool:
    """Switch the instruction set of the whole process; False when this machine or build lacks it. For tests."""
    library = native_library()
    assert library is not None
    return int(library.paged_attention_use_isa(name.encode())) == 0


class NativeAttention:
    """Attention by the C kernel over one KV pool. Implements `attention.Attention`."""

    def __init__(self, pool: KVPool, num_threads: int, arithmetic: Arithmetic = "float32") -> None:
        library = native_library()
        assert library is not None
        self._call = library.paged_attention
        self._pool = pool
        self._arithmetic = abi.FIELD_ENUMS["arithmetic"][arithmetic]
        self._step = NativeStep(threads=num_threads)
        self._held: tuple[Int32Array, ...] = ()

    def begin(self, batch: ForwardBatch) -> None:
        """Set the step's sequences, for every call until the next `begin`."""
        starts = np.ascontiguousarray(batch.query_starts, np.int32)
        lens = np.ascontiguousarray(batch.context_lens, np.int32)
        tables = np.ascontiguousarray(batch.block_tables, np.int32)
        self._held = (starts, lens, tables)  # the kernel keeps their addresses
        step = self._step
        step.query_starts, step.context_lens = starts.ctypes.data, lens.ctypes.data
        step.block_tables = tables.ctypes.data
        step.num_sequences, step.max_blocks = tables.shape

    def bind(
        self,
        step: AttentionStep,
        operands: AttentionOperands,
        output: FloatArray,
        rotation: RotaryOperands | None = None,
        sinks: FloatArray | None = None,
    ) -> Callable[[], None]:
        """Return the call that runs `step` on these buffers."""
        arrays = (*(array for array in operands if array is not None), output)
        assert output.flags.c_contiguous
        assert all(a.strides[1] == 4 and a.dtype == np.float32 for a in arrays)
        layer = Layer(self._pool.blocks.ctypes.data)
        place_layer(layer, self._pool.geometry, step.layer)
        layer.query, layer.query_stride = operands.query.ctypes.data, operands.query.strides[0] // 4
        layer.output, layer.output_stride = output.ctypes.data, output.strides[0] // 4
        if layer.writes:
            assert operands.key is not None
            layer.key, layer.key_stride = operands.key.ctypes.data, operands.key.strides[0] // 4
        if layer.writes and not layer.values_in_keys:
            assert operands.value is not None
            layer.value, layer.value_stride = operands.value.ctypes.data, operands.value.strides[0] // 4
        if rotation is not None:
            layer.cos, layer.sin = rotation.cos.ctypes.data, rotation.sin.ctypes.data
            layer.rotary_dim = rotation.rotary_dim
        layer.sinks = None if sinks is None else sinks.ctypes.data
        layer.num_heads, layer.num_kv_heads = step.num_heads, step.num_kv_heads
        layer.dim, layer.value_dim, layer.window = step.head_dim, step.output_dim, step.window
        layer.scale, layer.softcap, layer.arithmetic = step.scale, step.softcap, self._arithmetic
        call, layer_at, step_at = self._call, byref(layer), byref(self._step)

        def attend(_held: tuple[object, ...] = (layer, arrays, rotation, sinks, self)) -> None:
            if call(layer_at, step_at) != 0:
                raise EngineError(f"attention of layer {step.layer}: no memory for scratch space; free some memory")

        return attend


def place_layer(layer: Layer, geometry: KVGeometry, index: int) -> None:
    """Set where a layer is in the pool's blocks, and how it is stored."""
    own = geometry.layers[index]
    layer.keys, layer.values = own.keys, own.values
    layer.key_scales, layer.value_scales = own.key_scales, own.value_scales
    layer.block_bytes, layer.block_tokens = geometry.block_bytes, geometry.block_tokens
    layer.key_kind = kind_of(own.key_type, own.int4_group)
    layer.value_kind = kind_of(own.value_type, own.int4_group)
    layer.group = own.int4_group
    layer.values_in_keys = own.value_dim == 0
    layer.writes = own.source == index


class Attention(Protocol):
    """Attention over one KV pool: `begin` once per step, then each bound call once."""

    def begin(self, batch: ForwardBatch) -> None:
        """Set the step's sequences."""
        ...

    def bind(
        self,
        step: AttentionStep,
        operands: AttentionOperands,
        output: FloatArray,
        rotation: RotaryOperands | None = None,
        sinks: FloatArray | None = None,
    ) -> Callable[[], None]:
        """Return the call that writes keys and values into the pool and fills `output` [rows, heads * output_dim].

        `rotation` is applied to queries and keys; its tables must cover all positions of a batch. `sinks` [heads] are
        scores that take part in the softmax of their head and have no value: float32, C-contiguous.
        """
        ...


@cache
def attention_backend() -> str:
    """Return this process's backend: "numpy", or "native-" and the instruction set.

    INGOT_ATTENTION decides, else whether the kernel was built. EngineError when it requires a missing kernel.
    """
    asked = settings.attention()
    if asked == "numpy":
        _log.info("attention: numpy, set by INGOT_ATTENTION")
        return "numpy"
    if native_library() is None:
        if asked == "native":
            raise EngineError("INGOT_ATTENTION is native, but its kernel was not built; install with a C compiler")
        _log.warning("attention: numpy, several times slower; install with a C compiler to build the kernel")
        return "numpy"
    backend = f"native-{isa_in_use()}"
    _log.info("attention: %s", backend)
    return backend


def make_attention(pool: KVPool, num_threads: int) -> Attention:
    """Make the attention over `pool` with the backend in use."""
    if attention_backend() == "numpy":
        return NumpyAttention(pool)
    return NativeAttention(pool, num_threads)
