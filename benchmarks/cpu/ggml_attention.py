"""llama.cpp's flash attention, called in its own library by ctypes: one op, with a KV cache of f16, q8_0 or q4_0.

The library is libggml-cpu.so as llama-cpp-python builds it (benchmarks/cpu/setup_peers.py). See ggml.h.
"""

import ctypes
from collections.abc import Mapping
from ctypes import POINTER, Structure, c_bool, c_float, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingot.runtime.forward_batch import FloatArray

GGML_TYPES: Mapping[str, int] = {"f16": 1, "q8_0": 8, "q4_0": 2}
_F32, _F16 = 0, 1
_BYTES_OF_32 = {"f16": 64, "q8_0": 34, "q4_0": 18}  # of 32 elements


class _Params(Structure):
    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


class GgmlAttention:
    """One sequence: query [tokens, heads * dim], keys and values [kv heads, context, dim]."""

    def __init__(
        self, folder: Path, kind: str, query: FloatArray, keys: FloatArray, values: FloatArray, threads: int
    ) -> None:
        base, self._cpu = _libraries(folder)
        kv_heads, context, dim = keys.shape
        tokens, heads = len(query), query.shape[1] // dim
        self.kv_bytes = 2 * keys.size // 32 * _BYTES_OF_32[kind]
        rows = -(-tokens // 64) * 64
        size = self.kv_bytes + 8 * query.nbytes + 4 * rows * context + (64 << 20) + threads * (16 << 20)
        self._context = base.ggml_init(_Params(size, None, False))
        q = _tensor(base, self._context, _F32, (dim, tokens, heads))
        k, v = (_tensor(base, self._context, GGML_TYPES[kind], (dim, context, kv_heads)) for _ in range(2))
        mask = _tensor(base, self._context, _F16, (context, rows))
        _fill(base, q, query.reshape(tokens, heads, dim).transpose(1, 0, 2).astype(np.float32))
        for tensor, vectors in ((k, keys), (v, values)):
            _store(base, tensor, kind, vectors)
        seen = np.arange(context) <= np.arange(rows)[:, None] + context - tokens
        _fill(base, mask, np.where(seen, 0, -np.inf).astype(np.float16))
        self._output = base.ggml_flash_attn_ext(self._context, q, k, v, mask if tokens > 1 else None, dim**-0.5, 0, 0)
        self._graph = base.ggml_new_graph(self._context)
        base.ggml_build_forward_expand(self._graph, self._output)
        self._threads, self._shape, self._data = threads, (tokens, heads * dim), base.ggml_get_data_f32

    def attend(self) -> FloatArray:
        """Compute once; returns [tokens, heads * dim]."""
        status = self._cpu.ggml_graph_compute_with_ctx(self._context, self._graph, self._threads)
        assert status == 0, status
        tokens, columns = self._shape
        return np.ctypeslib.as_array(self._data(self._output), (tokens * columns,)).reshape(tokens, columns).copy()


def _libraries(folder: Path) -> tuple[ctypes.CDLL, ctypes.CDLL]:
    """libggml-base and libggml-cpu below the folder."""
    base, cpu = (ctypes.CDLL(str(next(folder.rglob(f"lib{name}.so"))), ctypes.RTLD_GLOBAL) for name in _NAMES)
    pointers = (
        "ggml_init", "ggml_new_tensor", "ggml_flash_attn_ext", "ggml_new_graph", "ggml_get_data",
    )  # fmt: skip
    for name in pointers:
        getattr(base, name).restype = c_void_p
    base.ggml_init.argtypes = (_Params,)
    base.ggml_new_tensor.argtypes = (c_void_p, c_int, c_int, POINTER(c_int64))
    base.ggml_get_data.argtypes = base.ggml_get_data_f32.argtypes = (c_void_p,)
    base.ggml_get_data_f32.restype = POINTER(c_float)
    base.ggml_flash_attn_ext.argtypes = (*(c_void_p,) * 5, c_float, c_float, c_float)
    base.ggml_new_graph.argtypes = (c_void_p,)
    base.ggml_build_forward_expand.argtypes = (c_void_p, c_void_p)
    base.ggml_quantize_chunk.argtypes = (c_int, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p)
    base.ggml_quantize_chunk.restype = c_size_t
    cpu.ggml_graph_compute_with_ctx.argtypes = (c_void_p, c_void_p, c_int)
    return base, cpu


_NAMES = ("ggml-base", "ggml-cpu")


def _tensor(base: ctypes.CDLL, context: int, kind: int, shape: tuple[int, ...]) -> int:
    tensor: int = base.ggml_new_tensor(context, kind, len(shape), (c_int64 * len(shape))(*shape))
    return tensor


def _fill(base: ctypes.CDLL, tensor: int, content: NDArray[Any]) -> None:
    content = np.ascontiguousarray(content)
    ctypes.memmove(base.ggml_get_data(tensor), content.ctypes.data, content.nbytes)


def _store(base: ctypes.CDLL, tensor: int, kind: str, vectors: FloatArray) -> None:
    if kind == "f16":
        _fill(base, tensor, vectors.astype(np.float16))
        return
    rows, dim = vectors.size // vectors.shape[-1], vectors.shape[-1]
    content = np.ascontiguousarray(vectors)
    target = base.ggml_get_data(tensor)
    base.ggml_quantize_chunk(GGML_TYPES[kind], content.ctypes.data, target, 0, rows, dim, None)
