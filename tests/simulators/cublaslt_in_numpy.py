"""Stand-in for nvmath's bindings of cuBLASLt: computes what the descriptors say, by columns, in host memory.

Every call is recorded. test_cublaslt_in_numpy.py checks names and numbers against the bindings.
"""

import ctypes
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

CUDA_TYPES: dict[str, int] = {"CUDA_R_32F": 0, "CUDA_R_16F": 2, "CUDA_R_16BF": 14}
_NUMPY_TYPES: dict[int, Any] = {0: np.float32, 2: np.float16, 14: ml_dtypes.bfloat16}
COMPUTE_32F = 68
VERSION = 130100


class CublasLtError(Exception):
    """Like cuBLASLtError, not a RuntimeError."""


class Numpy:
    """The bindings; `load` imports them. The heuristic finds `answers` algorithms, or fails if it is negative."""

    cuBLASLtError = CublasLtError  # noqa: N815
    matmul_heuristic_result_dtype = np.dtype(
        [
            ("algo", [("data_", "<u8", (8,))]),
            ("workspace_size", "<u8"),
            ("state", "<i4"),
            ("waves_count", "<f4"),
            ("reserved", "<i4", (4,)),
        ]
    )
    MatmulDescAttribute = IntEnum("MatmulDescAttribute", {"TRANSA": 3, "EPILOGUE": 7, "BIAS_POINTER": 8})
    MatmulPreferenceAttribute = IntEnum(
        "MatmulPreferenceAttribute",
        {
            "MAX_WORKSPACE_BYTES": 1,
            "REDUCTION_SCHEME_MASK": 3,
            "MIN_ALIGNMENT_A_BYTES": 5,
            "MIN_ALIGNMENT_B_BYTES": 6,
            "MIN_ALIGNMENT_C_BYTES": 7,
            "MIN_ALIGNMENT_D_BYTES": 8,
        },
    )
    Epilogue = IntEnum("Epilogue", {"DEFAULT": 1, "BIAS": 4})
    ReductionScheme = IntEnum("ReductionScheme", {"NONE": 0, "COMPUTE_TYPE": 2})

    def __init__(self, answers: int = 1) -> None:
        self.answers, self.refuses = answers, False
        self.calls: list[tuple[Any, ...]] = []
        self.live: dict[int, dict[str, Any]] = {}

    def load(self, name: str) -> Any:
        blas = SimpleNamespace(ComputeType=SimpleNamespace(COMPUTE_32F=COMPUTE_32F), Operation=SimpleNamespace(T=1))
        modules = {
            "nvmath": SimpleNamespace(CudaDataType=SimpleNamespace(**CUDA_TYPES)),
            "nvmath.bindings.cublas": blas,
        }
        return modules.get(name, self)

    def named(self, name: str) -> list[tuple[Any, ...]]:
        """Arguments of each call of a function."""
        return [call[1:] for call in self.calls if call[0] == name]

    def get_version(self) -> int:
        return VERSION

    def create(self) -> int:
        return self._make("create")

    def matmul_desc_create(self, compute: int, scale: int) -> int:
        return self._make("matmul_desc_create", compute, scale)

    def matrix_layout_create(self, kind: int, rows: int, columns: int, stride: int) -> int:
        return self._make("matrix_layout_create", kind, rows, columns, stride)

    def matmul_preference_create(self) -> int:
        return self._make("matmul_preference_create")

    def get_matmul_desc_attribute_dtype(self, attribute: int) -> Any:
        return {3: np.int32, 7: np.uint32, 8: np.int64}[attribute]

    def get_matmul_preference_attribute_dtype(self, attribute: int) -> Any:
        return np.uint64 if attribute == 1 else np.uint32

    def matmul_desc_set_attribute(self, owner: int, attribute: int, memory: int, size: int) -> None:
        self._set(self.MatmulDescAttribute(attribute), owner, memory, size, self.get_matmul_desc_attribute_dtype)

    def matmul_preference_set_attribute(self, owner: int, attribute: int, memory: int, size: int) -> None:
        dtype = self.get_matmul_preference_attribute_dtype
        self._set(self.MatmulPreferenceAttribute(attribute), owner, memory, size, dtype)

    def matmul_algo_get_heuristic(self, *given: int) -> None:
        self.calls.append(("matmul_algo_get_heuristic", *given[:8]))
        if self.answers < 0:
            raise CublasLtError("not supported")
        found = _memory(given[8], self.matmul_heuristic_result_dtype, 1)
        found["algo"]["data_"] = np.arange(8)
        _memory(given[9], np.dtype(np.int32), 1)[0] = self.answers

    def matmul(self, *given: int) -> None:
        self.calls.append(("matmul", *given))
        if self.refuses:
            raise CublasLtError("an internal operation failed")
        handle, operation, alpha, a, a_layout, b, b_layout, beta, c, c_layout, d, d_layout, algorithm, *_ = given
        assert handle in self.live
        assert (c, c_layout) == (d, d_layout)
        assert _memory(algorithm, np.dtype(np.uint64), 8).tolist() == list(range(8))
        wanted, factor = self.live[operation], _memory(alpha, np.dtype(np.float32), 1)[0]
        left, right, out = (self._matrix(*one) for one in ((a, a_layout), (b, b_layout), (d, d_layout)))
        left = left.T if wanted.get("TRANSA") == 1 else left
        result = factor * (left.astype(np.float32) @ right.astype(np.float32))
        if wanted.get("EPILOGUE") == self.Epilogue.BIAS:
            result += _memory(wanted["BIAS_POINTER"], out.dtype, len(result)).astype(np.float32)[:, None]
        assert _memory(beta, np.dtype(np.float32), 1)[0] == 0
        out[:] = result

    def destroy(self, made: int) -> None:
        self.calls.append(("destroy", made))
        del self.live[made]

    matmul_desc_destroy = matrix_layout_destroy = matmul_preference_destroy = destroy

    def _make(self, name: str, *given: Any) -> int:
        self.calls.append((name, *given))
        made = 1000 + len(self.calls)
        self.live[made] = {"given": given}
        return made

    def _set(self, attribute: Any, owner: int, memory: int, size: int, dtype: Any) -> None:
        kind = np.dtype(dtype(attribute))
        assert size == kind.itemsize
        self.live[owner][attribute.name] = int(_memory(memory, kind, 1)[0])

    def _matrix(self, address: int, layout: int) -> NDArray[Any]:
        """A view by columns, as the layout says."""
        kind, rows, columns, stride = self.live[layout]["given"]
        flat = _memory(address, np.dtype(_NUMPY_TYPES[kind]), stride * (columns - 1) + rows)
        return np.lib.stride_tricks.as_strided(flat, (rows, columns), (flat.itemsize, stride * flat.itemsize))


def _memory(address: int, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    raw: NDArray[Any] = np.ctypeslib.as_array((ctypes.c_uint8 * (dtype.itemsize * count)).from_address(address))
    return raw.view(dtype)
