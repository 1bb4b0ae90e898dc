"""nvmath-python has the names and numbers that cublaslt_in_numpy.py imitates."""

from enum import IntEnum
from typing import Any

import numpy as np
import pytest

from tests.simulators.cublaslt_in_numpy import COMPUTE_32F, CUDA_TYPES, Numpy

_REASON = "nvmath-python is not installed: pip install '.[cublas]'"
lt: Any = pytest.importorskip("nvmath.bindings.cublasLt", reason=_REASON)
blas: Any = pytest.importorskip("nvmath.bindings.cublas", reason=_REASON)
nvmath: Any = pytest.importorskip("nvmath", reason=_REASON)


def test_nvmath_has_every_function() -> None:
    wanted = [name for name, value in vars(Numpy).items() if callable(value) and name[0] != "_"]
    assert {name for name in wanted if not hasattr(lt, name)} == {"load", "named"}
    assert issubclass(lt.cuBLASLtError, Exception)
    assert not issubclass(lt.cuBLASLtError, RuntimeError)


@pytest.mark.parametrize("name", [name for name, value in vars(Numpy).items() if isinstance(value, type(IntEnum))])
def test_every_number_is_nvmaths(name: str) -> None:
    mine: type[IntEnum] = getattr(Numpy, name)
    assert {one.name: int(one) for one in mine}.items() <= {one.name: int(one) for one in getattr(lt, name)}.items()


def test_types_are_nvmaths() -> None:
    assert {name: int(getattr(nvmath.CudaDataType, name)) for name in CUDA_TYPES} == CUDA_TYPES
    assert (int(blas.ComputeType.COMPUTE_32F), int(blas.Operation.T)) == (COMPUTE_32F, 1)
    assert np.dtype(lt.matmul_heuristic_result_dtype) == Numpy.matmul_heuristic_result_dtype
    numpy = Numpy()
    for one in Numpy.MatmulDescAttribute:
        assert lt.get_matmul_desc_attribute_dtype(one) is numpy.get_matmul_desc_attribute_dtype(one)
    for each in Numpy.MatmulPreferenceAttribute:
        assert lt.get_matmul_preference_attribute_dtype(each) is numpy.get_matmul_preference_attribute_dtype(each)
