"""cuBLASLt gets the right descriptors, on a stand-in that computes what they say."""

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from ingot.artifact.programs.launch_program import BufferArgument, LibraryMatmul, WeightArgument
from ingot.errors import EngineError
from ingot.runtime.cuda.cublaslt import WORKSPACE_BYTES, CublasLt
from tests.simulators.cublaslt_in_numpy import COMPUTE_32F, CUDA_TYPES, Numpy
from tests.simulators.interpreted_device import InterpretedDevice

ROWS, N, COLUMNS, X_STRIDE, OUT_STRIDE = 3, 24, 40, 48, 64
STREAM = 4711  # the library only gets its number
DTYPES: Mapping[str, Any] = {"fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}
UNITS = {"fp32": 1e-6, "fp16": 5e-4, "bf16": 4e-3}


def matmul(type_: str = "fp16", out_type: str | None = None, *, bias: bool = False, **changed: Any) -> LibraryMatmul:
    """A matmul whose rows are part of wider ones, in and out."""
    out = out_type or type_
    given = {
        "rows": ROWS,
        "n": N,
        "columns": COLUMNS,
        "x": BufferArgument(name="x", type=type_),
        "weight": WeightArgument(name="w", type=type_),
        "bias": WeightArgument(name="b", type=out) if bias else None,
        "out": BufferArgument(name="y", type=out),
        "x_stride": X_STRIDE,
        "out_stride": OUT_STRIDE,
        "node": "layers.0.q_proj",
    }
    return LibraryMatmul.model_validate(given | changed)


class Operands:
    """Random operands in a device's memory; `out` shows the result."""

    def __init__(self, device: InterpretedDevice, one: LibraryMatmul) -> None:
        rng, sizes = np.random.default_rng(0), {"x": ROWS * X_STRIDE, "weight": N * COLUMNS, "bias": N}
        self.arrays: dict[str, NDArray[Any]] = {}
        self.addresses: dict[str, int] = {}
        for name, operand in one.operands.items():
            count, dtype = sizes.get(name, ROWS * OUT_STRIDE), np.dtype(DTYPES[operand.type])
            self.addresses[name] = device.allocate(count * dtype.itemsize, name)
            self.arrays[name] = device.view(self.addresses[name], count * dtype.itemsize).view(dtype)
            self.arrays[name][:] = rng.standard_normal(count).astype(dtype)

    @property
    def out(self) -> NDArray[np.float32]:
        """[rows, OUT_STRIDE]"""
        return self.arrays["out"].astype(np.float32).reshape(ROWS, OUT_STRIDE)

    def expected(self, alpha: float) -> NDArray[np.float32]:
        x, weight = (self.arrays[name].astype(np.float32) for name in ("x", "weight"))
        bias = self.arrays["bias"].astype(np.float32) if "bias" in self.arrays else np.float32(0)
        return np.float32(alpha) * (x.reshape(ROWS, X_STRIDE)[:, :COLUMNS] @ weight.reshape(N, COLUMNS).T) + bias


@pytest.mark.parametrize(
    ("types", "bias", "alpha"),
    [
        (("fp16", "fp16"), True, 1.0),
        (("bf16", "bf16"), True, 0.5),
        (("fp16", "fp32"), False, 2.0),
        (("fp32",) * 2, 0, 1),
    ],
)
def test_the_descriptors_are_rows_times_the_transposed_weight(types: tuple[str, str], bias: bool, alpha: float) -> None:
    device, one = InterpretedDevice(), matmul(*types, bias=bias, alpha=alpha)
    operands = Operands(device, one)
    before, wanted = operands.out, operands.expected(alpha)
    CublasLt(device, STREAM, Numpy().load)(one, operands.addresses)(STREAM)
    np.testing.assert_allclose(operands.out[:, :N], wanted, atol=UNITS[types[1]] * np.abs(wanted).max())
    np.testing.assert_array_equal(operands.out[:, N:], before[:, N:])


def test_operands_are_swapped_and_sums_are_float32_in_a_fixed_order() -> None:
    device, numpy, one = InterpretedDevice(), Numpy(), matmul("fp16", "fp32")
    operands = Operands(device, one)
    CublasLt(device, STREAM, numpy.load)(one, operands.addresses)(STREAM)
    half, single = CUDA_TYPES["CUDA_R_16F"], CUDA_TYPES["CUDA_R_32F"]
    assert numpy.named("matmul_desc_create") == [(COMPUTE_32F, single)]
    weight, x, out = numpy.named("matrix_layout_create")
    assert weight == (half, COLUMNS, N, COLUMNS)
    assert x == (half, COLUMNS, ROWS, X_STRIDE)
    assert out == (single, N, ROWS, OUT_STRIDE)
    preference = next(made for made in numpy.live.values() if "REDUCTION_SCHEME_MASK" in made)
    assert preference["REDUCTION_SCHEME_MASK"] == Numpy.ReductionScheme.COMPUTE_TYPE
    assert preference["MAX_WORKSPACE_BYTES"] == WORKSPACE_BYTES
    assert {preference[f"MIN_ALIGNMENT_{operand}_BYTES"] for operand in "ABCD"} == {16}
    given = numpy.named("matmul")[0]
    assert (given[3], given[5], given[10]) == tuple(operands.addresses[name] for name in ("weight", "x", "out"))
    assert given[-2:] == (WORKSPACE_BYTES, STREAM)
    assert given[-3] in device.memory


def test_an_algorithm_is_chosen_once_a_shape_and_queueing_calls_nothing_else() -> None:
    device, numpy = InterpretedDevice(), Numpy()
    library, layers = CublasLt(device, STREAM, numpy.load), [matmul(bias=True, node=f"layers.{i}") for i in range(3)]
    all_operands = [Operands(device, one) for one in layers]
    queues = [library(one, given.addresses) for one, given in zip(layers, all_operands, strict=True)]
    assert library(layers[0], all_operands[0].addresses) is queues[0]
    assert len(numpy.named("matmul_algo_get_heuristic")) == 1
    assert len(numpy.named("matmul_desc_create")) == 3  # each has its own bias
    library(matmul(bias=True, x_stride=X_STRIDE + 8), all_operands[0].addresses)
    assert len(numpy.named("matmul_algo_get_heuristic")) == 2
    known, memory = len(numpy.calls), len(device.memory)
    for queue in queues:
        queue(STREAM)
    assert [call[0] for call in numpy.calls[known:]] == ["matmul"] * 3
    assert len(device.memory) == memory


def test_everything_is_freed_once() -> None:
    device, numpy = InterpretedDevice(), Numpy()
    library = CublasLt(device, STREAM, numpy.load)
    operands = Operands(device, matmul())
    library(matmul(), operands.addresses)
    library.close()
    library.close()
    assert not numpy.live
    assert set(device.memory) == set(operands.addresses.values())
    assert numpy.calls[-1] == ("destroy", numpy.calls[-1][1])


@pytest.mark.parametrize("answers", [0, -1])
def test_a_shape_without_an_algorithm_is_refused_with_what_to_do(answers: int) -> None:
    device = InterpretedDevice()
    library, one = CublasLt(device, STREAM, Numpy(answers).load), matmul(bias=True)
    with pytest.raises(
        EngineError,
        match=r"'layers.0.q_proj': cuBLASLt 130100 has no algorithm for 3 x 24 x 40 \(rows, n, columns\) of fp16 to "
        r"fp16 with a bias on an interpreter .*; run `ingot tune` with this version and build with its table, or build",
    ):
        library(one, Operands(device, one).addresses)


def test_an_error_of_the_library_names_the_node() -> None:
    device, numpy, one = InterpretedDevice(), Numpy(), matmul()
    queue = CublasLt(device, STREAM, numpy.load)(one, Operands(device, one).addresses)
    numpy.refuses = True
    with pytest.raises(EngineError, match=r"cuBLASLt: queueing 'layers.0.q_proj': an internal operation failed"):
        queue(STREAM)


def test_missing_bindings_and_a_missing_library_say_what_to_install() -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError("No module named 'nvmath'")

    class NoLibrary(Numpy):
        def get_version(self) -> int:
            raise RuntimeError("Failed to find libcublasLt.so\n  listdir")

    with pytest.raises(
        EngineError,
        match=r"cannot be imported \(No module .*\): .*pip install .*\[cublas\]', or build",
    ):
        CublasLt(InterpretedDevice(), STREAM, missing)
    with pytest.raises(
        EngineError,
        match=r"cannot be loaded \(Failed to find libcublasLt.so\): .*pip install .*\[cublas\]', or",
    ):
        CublasLt(InterpretedDevice(), STREAM, NoLibrary().load)
