"""Operands of a measured matmul: copies of the weight, arguments, patterns that are finite numbers."""

from typing import cast

import ml_dtypes
import numpy as np
import pytest

from ingot.artifact.launch_program import CudaProgram
from ingot.builder.tune.candidates import Matmul, matmuls_of
from ingot.builder.tune.measure import Operands, _pattern
from ingot.runtime.cuda.device import Device, Stream
from tests.builder.tune.gpu_times import wide
from tests.kernels.packed_spans import packed_spans
from tests.simulators.fake_gpu import FakeGpu

ROTATED_BYTES = 2**18


@pytest.fixture
def matmul(program: CudaProgram) -> Matmul:
    """A matmul over packed codes."""
    return next(one for one in matmuls_of(program) if one.shape.kernel == "matmul_nbits")


def operands(gpu: FakeGpu, matmul: Matmul) -> Operands:
    return Operands.of(cast(Device, gpu), cast(Stream, None), matmul, ROTATED_BYTES)


def test_copies_of_the_weight_exceed_the_cache_and_all_memory_is_freed(matmul: Matmul) -> None:
    gpu = FakeGpu(wide)
    made = operands(gpu, matmul)
    shape = matmul.shape
    code_bytes = packed_spans(np.zeros((shape.n, shape.columns), np.uint8), shape.bits).nbytes
    assert len(set(made.weights)) == len(made.weights) == min(64, -(-ROTATED_BYTES // code_bytes))
    assert made.weights[0] == made.addresses["codes"]
    assert {*made.addresses.values(), *made.weights} == gpu.held
    made.free()
    assert not gpu.held


def test_arguments_of_a_launch_differ_only_in_the_copy_of_the_weight(matmul: Matmul) -> None:
    made = operands(FakeGpu(wide), matmul)
    first, second = (made.given(matmul, matmul.kernel, copy) for copy in (0, 1))
    assert [kind for kind, _ in first] == list(matmul.kernel.types)
    differing = [(one, other) for one, other in zip(first, second, strict=True) if one != other]
    assert [(one[1], other[1]) for one, other in differing] == [made.weights[:2]]
    by_name = dict(zip(matmul.arguments, (value for _, value in first), strict=True))
    assert {name: by_name[name] for name in matmul.numbers} == matmul.numbers


def test_a_library_gets_the_operands_that_it_reads(program: CudaProgram) -> None:
    plain = next(one for one in matmuls_of(program) if one.shape.kernel == "matmul")
    made = operands(FakeGpu(wide), plain)
    given = made.of_library(1)
    assert given["weight"] == made.weights[1]
    assert {name: given[name] for name in ("x", "out")} == {name: made.addresses[name] for name in ("x", "out")}


@pytest.mark.parametrize(
    ("form", "kind", "dtype"),
    [
        ("", "fp16", np.float16),
        ("scales", "bf16", ml_dtypes.bfloat16),
        ("", "fp32", np.float32),
        ("", "fp8e4nv", ml_dtypes.float8_e4m3fn),
    ],
)
def test_random_floats_are_finite_and_not_constant(form: str, kind: str, dtype: type) -> None:
    values = _pattern(form, kind).view(dtype).astype(np.float32)
    assert np.isfinite(values).all()
    assert len(np.unique(values)) > 100


def test_random_zero_points_are_in_the_middle_of_4_bits() -> None:
    assert set(np.unique(_pattern("zero_points", "u8"))) == {7, 8, 9}
