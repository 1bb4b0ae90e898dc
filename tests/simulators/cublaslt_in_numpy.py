"""Stand-in for cuBLASLt: computes what the descriptors say, by columns, in host memory.

Its functions are C functions of the prototypes that cublaslt.py declares, and every call is recorded.
test_cublaslt_in_numpy.py checks the numbers against nvmath's bindings.
"""

import ctypes
from collections.abc import Callable, Mapping
from ctypes import CFUNCTYPE, POINTER, c_void_p
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ingot.runtime.cuda.cublaslt import ADD_BIAS, OPERATION, OUTER_VECTOR, PREFERENCE, PROTOTYPES, TYPES, Found

_NUMPY_TYPES: dict[str, Any] = {
    "fp32": np.float32,
    "fp16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "fp8e4nv": ml_dtypes.float8_e4m3fn,
}
_BY_NUMBER: dict[int, np.dtype[Any]] = {number: np.dtype(_NUMPY_TYPES[name]) for name, number in TYPES.items()}
VERSION = 130100
_NOT_SUPPORTED, _INTERNAL_ERROR = 15, 14
_WORDS = {
    _NOT_SUPPORTED: b"the requested functionality is not supported",
    _INTERNAL_ERROR: b"an internal operation failed",
}


class Numpy:
    """The library. The heuristic finds `answers` algorithms, or fails if it is negative.

    An assertion that fails is kept in `failed`, and the library's caller gets an error.
    """

    def __init__(self, answers: int = 1) -> None:
        self.answers, self.refuses = answers, False
        self.calls: list[tuple[Any, ...]] = []
        self.live: dict[int, dict[str, Any]] = {}
        self.failed: list[BaseException] = []
        create, destroy = self._create, self._destroy
        self._python: Mapping[str, Callable[..., Any]] = {
            "cublasLtGetVersion": lambda: VERSION,
            "cublasLtCreate": create("create"),
            "cublasLtMatmulDescCreate": create("matmul_desc_create"),
            "cublasLtMatrixLayoutCreate": create("matrix_layout_create"),
            "cublasLtMatmulPreferenceCreate": create("matmul_preference_create"),
            **dict.fromkeys([name for name in PROTOTYPES if name.endswith("Destroy")], destroy),
            "cublasLtMatmulDescSetAttribute": self._setter(OPERATION),
            "cublasLtMatmulPreferenceSetAttribute": self._setter(PREFERENCE),
            "cublasLtMatmulAlgoGetHeuristic": self._heuristic,
            "cublasLtMatmul": self.matmul,
        }
        for name, function in self._python.items():
            setattr(self, name, CFUNCTYPE(*PROTOTYPES[name])(self._status(function)))
        self.cublasLtGetStatusString = lambda status: _WORDS[status]  # no function of ctypes may return text

    def load(self) -> Any:
        return self

    def named(self, name: str) -> list[tuple[Any, ...]]:
        """Arguments of each call of a function."""
        return [call[1:] for call in self.calls if call[0] == name]

    def matmul(self, *given: int) -> int:
        self.calls.append(("matmul", *given))
        if self.refuses:
            return _INTERNAL_ERROR
        self.multiply(*given)
        return 0

    def multiply(self, *given: int) -> None:
        handle, operation, alpha, a, a_layout, b, b_layout, beta, c, c_layout, d, d_layout, algorithm, *_ = given
        assert handle in self.live
        assert (c, c_layout) == (d, d_layout)
        assert _memory(algorithm, np.dtype(np.uint64), 8).tolist() == list(range(8))
        wanted, factor = self.live[operation], _memory(alpha, np.dtype(np.float32), 1)[0]
        left, right, out = (self._matrix(*one) for one in ((a, a_layout), (b, b_layout), (d, d_layout)))
        left = left.T if wanted.get("TRANSA") == 1 else left
        result = factor * (left.astype(np.float32) @ right.astype(np.float32))
        for operand, axis in (("A", 1), ("B", 0)):
            if f"{operand}_SCALE_POINTER" in wanted:
                assert wanted[f"{operand}_SCALE_MODE"] == OUTER_VECTOR
                assert left.dtype == right.dtype == _BY_NUMBER[TYPES["fp8e4nv"]]
                scales = _memory(wanted[f"{operand}_SCALE_POINTER"], np.dtype(np.float32), result.shape[1 - axis])
                result *= np.expand_dims(scales, axis)
        if wanted.get("EPILOGUE") == ADD_BIAS:
            result += _memory(wanted["BIAS_POINTER"], out.dtype, len(result)).astype(np.float32)[:, None]
        assert _memory(beta, np.dtype(np.float32), 1)[0] == 0
        out[:] = result

    def _heuristic(self, *given: int) -> int:
        self.calls.append(("matmul_algo_get_heuristic", *given[:8]))
        if self.answers < 0:
            return _NOT_SUPPORTED
        found = ctypes.cast(given[8], POINTER(Found))[0]
        found.algorithm[:] = range(8)
        _memory(given[9], np.dtype(np.int32), 1)[0] = self.answers
        return 0

    def _create(self, name: str) -> Callable[..., int]:
        def create(place: int, *given: int) -> int:
            self.calls.append((name, *given))
            made = 1000 + len(self.calls)
            self.live[made] = {"given": given}
            ctypes.cast(place, POINTER(c_void_p))[0] = made
            return 0

        return create

    def _destroy(self, made: int) -> int:
        self.calls.append(("destroy", made))
        del self.live[made]
        return 0

    def _setter(self, known: Any) -> Callable[..., int]:
        by_number = {number: (name, type_) for name, (number, type_) in known.items()}

        def set_attribute(owner: int, attribute: int, memory: int, size: int) -> int:
            name, type_ = by_number[attribute]
            assert size == ctypes.sizeof(type_)
            self.live[owner][name] = int(type_.from_address(memory).value)
            return 0

        return set_attribute

    def _status(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*given: int) -> Any:
            try:
                return function(*given)
            except Exception as error:  # noqa: BLE001  # C has no exceptions
                self.failed.append(error)
                return _INTERNAL_ERROR

        return called

    def _matrix(self, address: int, layout: int) -> NDArray[Any]:
        """A view by columns, as the layout says."""
        kind, rows, columns, stride = self.live[layout]["given"]
        flat = _memory(address, _BY_NUMBER[kind], stride * (columns - 1) + rows)
        return np.lib.stride_tricks.as_strided(flat, (rows, columns), (flat.itemsize, stride * flat.itemsize))


def _memory(address: int, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    raw: NDArray[Any] = np.ctypeslib.as_array((ctypes.c_uint8 * (dtype.itemsize * count)).from_address(address))
    return raw.view(dtype)
