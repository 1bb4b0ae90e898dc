"""The numbers that cublaslt.py passes to the library are those of nvmath-python, which is made from its header."""

import ctypes
from typing import Any

import numpy as np
import pytest

from ingot.runtime.cuda import cublaslt

_REASON = "nvmath-python is not installed: pip install --group gpu-targets"
lt: Any = pytest.importorskip("nvmath.bindings.cublasLt", reason=_REASON)
blas: Any = pytest.importorskip("nvmath.bindings.cublas", reason=_REASON)
nvmath: Any = pytest.importorskip("nvmath", reason=_REASON)


def test_attributes_have_nvmaths_numbers_and_sizes() -> None:
    tables = (
        (cublaslt.OPERATION, lt.MatmulDescAttribute, lt.get_matmul_desc_attribute_dtype),
        (cublaslt.PREFERENCE, lt.MatmulPreferenceAttribute, lt.get_matmul_preference_attribute_dtype),
    )
    for known, theirs, type_of in tables:
        for name, (number, type_) in known.items():
            assert number == int(theirs[name]), name
            assert np.dtype(type_of(theirs[name])).itemsize == ctypes.sizeof(type_), name


def test_values_are_nvmaths() -> None:
    kinds = {"fp32": "CUDA_R_32F", "fp16": "CUDA_R_16F", "bf16": "CUDA_R_16BF", "fp8e4nv": "CUDA_R_8F_E4M3"}
    assert {name: int(getattr(nvmath.CudaDataType, kind)) for name, kind in kinds.items()} == cublaslt.TYPES
    assert int(blas.ComputeType.COMPUTE_32F) == cublaslt.COMPUTE_32F
    assert int(blas.Operation.T) == cublaslt.TRANSPOSED
    assert int(lt.Epilogue.BIAS) == cublaslt.ADD_BIAS
    assert int(lt.ReductionScheme.COMPUTE_TYPE) == cublaslt.IN_FLOAT32
    assert int(lt.MatmulMatrixScale.OUTER_VEC_32F) == cublaslt.OUTER_VECTOR


def test_the_heuristics_result_has_nvmaths_layout() -> None:
    theirs = np.dtype(lt.matmul_heuristic_result_dtype)
    mine = cublaslt.Found
    assert ctypes.sizeof(mine) == theirs.itemsize
    assert theirs.fields is not None
    places = [theirs.fields[name][1] for name in ("algo", "workspace_size", "state", "waves_count", "reserved")]
    assert [getattr(mine, name).offset for name, _ in mine._fields_] == places
