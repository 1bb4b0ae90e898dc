"""Attention of the CPU engine: the C kernel (paged_attention.c, by ctypes) where it was built, else numpy.

The library is a plain shared object, not a Python module; hatch_build.py compiles it. The backend is chosen and logged
once per process; INGOT_ATTENTION=numpy forces numpy, for comparisons or when a fault of the kernel is suspected.
"""

import ctypes
import logging
from collections.abc import Callable
from ctypes import POINTER, Structure, byref, c_char_p, c_float, c_int, c_int32, c_int64, c_void_p, sizeof
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Protocol

import numpy as np

from ingot import settings
from ingot.artifact import AttentionStep, KVGeometry
from ingot.errors import EngineError
from ingot.runtime.cpu.attention_operands import Operands, Rotation
from ingot.runtime.cpu.kv_pool import KVPool
from ingot.runtime.cpu.kv_precision import kind_of
from ingot.runtime.cpu.native.numpy_attention import NumpyAttention
from ingot.runtime.steps.batch import FloatArray, ForwardBatch, Int32Array

_log = logging.getLogger(__name__)


class _Layer(Structure):
    """paged_attention.c's struct layer."""

    _fields_ = (
        ("pool", c_void_p),
        ("block_bytes", c_int64),
        ("keys", c_int64),
        ("values", c_int64),
        ("key_scales", c_int64),
        ("value_scales", c_int64),
        ("query", c_void_p),
        ("key", c_void_p),
        ("value", c_void_p),
        ("output", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("query_stride", c_int64),
        ("key_stride", c_int64),
        ("value_stride", c_int64),
        ("rotary_dim", c_int32),
        ("key_kind", c_int32),
        ("value_kind", c_int32),
        ("group", c_int32),
        ("writes", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("dim", c_int32),
        ("block_tokens", c_int32),
        ("window", c_int32),
        ("scale", c_float),
        ("softcap", c_float),
    )


class _Step(Structure):
    """paged_attention.c's struct step."""

    _fields_ = (
        ("query_starts", c_void_p),
        ("context_lens", c_void_p),
        ("block_tables", c_void_p),
        ("num_sequences", c_int32),
        ("max_blocks", c_int32),
        ("threads", c_int32),
    )


@cache
def native_library() -> ctypes.CDLL | None:
    """Load the library; None when it was not built. Raises EngineError when it exists but does not load."""
    path = library_file(Path(__file__).parent)
    return load_library(path) if path is not None else None


def load_library(path: Path) -> ctypes.CDLL:
    """Load a library that paged_attention.c was compiled to. Raises EngineError for anything else."""
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        message = f"{path}: does not load ({error}); build it again, or remove it to use numpy"
        raise EngineError(message) from error
    if not _is_of_this_version(library, path.parent):
        raise EngineError(
            f"{path}: was built from another version of its source; install Ingot again: pip install -e . in a checkout"
        )
    library.paged_attention.argtypes = (POINTER(_Layer), POINTER(_Step))
    library.paged_attention.restype = c_int
    library.paged_attention_isa.restype = c_char_p
    library.paged_attention_use_isa.argtypes = (c_char_p,)
    return library


def library_file(folder: Path) -> Path | None:
    """Return the built library; in a source tree where it was not built again, the one by its earlier name."""
    candidates = (folder / "paged_attention.so", *folder.glob("_paged_attention.*.so"))
    return next(filter(Path.is_file, candidates), None)


def _is_of_this_version(library: ctypes.CDLL, folder: Path) -> bool:
    """Whether the library fits this binding and, in a source tree, was built from the sources that are there."""
    try:
        library.paged_attention_source.restype = c_char_p
        built_from, layer_bytes = library.paged_attention_source(), library.paged_attention_layer_bytes()
    except AttributeError:
        return False
    return layer_bytes == sizeof(_Layer) and source_digest(folder) in (None, built_from.decode())


def source_digest(folder: Path) -> str | None:
    """Digest of the C sources in a folder, as the build computes it; None without sources, as in a wheel."""
    sources = sorted([*folder.glob("*.c"), *folder.glob("*.h")])
    return sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16] if sources else None


def isa_in_use() -> str:
    """Instruction set that the library runs: avx512, avx2 or baseline."""
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

    def __init__(self, pool: KVPool, num_threads: int) -> None:
        library = native_library()
        assert library is not None
        self._call = library.paged_attention
        self._pool = pool
        self._step = _Step(threads=num_threads)
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
        self, step: AttentionStep, operands: Operands, output: FloatArray, rotation: Rotation | None = None
    ) -> Callable[[], None]:
        """Return the call that runs `step` on these buffers."""
        arrays = (*(array for array in operands if array is not None), output)
        assert output.flags.c_contiguous
        assert all(a.strides[1] == 4 and a.dtype == np.float32 for a in arrays)
        layer = _Layer(self._pool.blocks.ctypes.data)
        _place(layer, self._pool.geometry, step.layer)
        layer.query, layer.query_stride = operands.query.ctypes.data, operands.query.strides[0] // 4
        layer.output = output.ctypes.data
        if layer.writes:
            assert operands.key is not None
            assert operands.value is not None
            layer.key, layer.key_stride = operands.key.ctypes.data, operands.key.strides[0] // 4
            layer.value, layer.value_stride = operands.value.ctypes.data, operands.value.strides[0] // 4
        if rotation is not None:
            layer.cos, layer.sin = rotation.cos.ctypes.data, rotation.sin.ctypes.data
            layer.rotary_dim = rotation.rotary_dim
        layer.num_heads, layer.num_kv_heads, layer.dim = step.num_heads, step.num_kv_heads, step.head_dim
        layer.window = step.window
        layer.scale, layer.softcap = step.scale, step.softcap
        call, layer_at, step_at = self._call, byref(layer), byref(self._step)

        def attend(_held: tuple[object, ...] = (layer, arrays, rotation, self)) -> None:
            if call(layer_at, step_at) != 0:
                raise EngineError(f"attention of layer {step.layer}: no memory for scratch space; free some memory")

        return attend


def _place(layer: _Layer, geometry: KVGeometry, index: int) -> None:
    """Set where a layer is in the pool's blocks, and how it is stored."""
    own = geometry.layers[index]
    layer.keys, layer.values = own.keys, own.values
    layer.key_scales, layer.value_scales = own.key_scales, own.value_scales
    layer.block_bytes, layer.block_tokens = geometry.block_bytes, geometry.block_tokens
    layer.key_kind = kind_of(own.key_type, own.int4_group)
    layer.value_kind = kind_of(own.value_type, own.int4_group)
    layer.group = own.int4_group
    layer.writes = own.source == index


class Attention(Protocol):
    """Attention over one KV pool: `begin` once per step, then each bound call once."""

    def begin(self, batch: ForwardBatch) -> None:
        """Set the step's sequences."""
        ...

    def bind(
        self, step: AttentionStep, operands: Operands, output: FloatArray, rotation: Rotation | None = None
    ) -> Callable[[], None]:
        """Return the call that writes key and value into the pool, attends, and fills `output` [rows, heads * dim].

        `rotation` is applied to queries and keys; its tables must cover all positions of a batch.
        """
        ...


@cache
def attention_backend() -> str:
    """Return this process's backend: "native-avx512", "native-avx2", "native-baseline" or "numpy".

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
