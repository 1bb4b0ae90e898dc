"""cuBLASLt gets the right descriptors, on a stand-in that computes what they say."""

from collections.abc import Mapping
from ctypes import c_int64
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from ingot.artifact.programs.launch_program import BufferArgument, LibraryMatmul, WeightArgument
from ingot.errors import EngineError
from ingot.runtime.cuda import cublaslt
from ingot.runtime.cuda.cublaslt import COMPUTE_32F, IN_FLOAT32, TYPES, WORKSPACE_BYTES, CublasLt, CublasLtLibrary
from tests.gpu.conftest import require_cublaslt
from tests.simulators.cublaslt_in_numpy import Numpy
from tests.simulators.interpreted_device import InterpretedDevice

ROWS, N, COLUMNS, X_STRIDE, OUT_STRIDE = 3, 32, 48, 64, 80
STREAM = 4711  # the library only gets its number
DTYPES: Mapping[str, Any] = {
    "fp32": np.float32,
    "fp16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "fp8e4nv": ml_dtypes.float8_e4m3fn,
}
UNITS = {"fp32": 1e-6, "fp16": 5e-4, "bf16": 4e-3}


def matmul(type_: str = "fp16", out_type: str | None = None, *, bias: bool = False, **changed: Any) -> LibraryMatmul:
    """A matmul whose rows are part of wider ones, in and out."""
    out = out_type or type_
    scales = BufferArgument(name="xs", type="fp32"), WeightArgument(name="ws", type="fp32")
    given = {
        "rows": ROWS,
        "n": N,
        "columns": COLUMNS,
        "x": BufferArgument(name="x", type=type_),
        "weight": WeightArgument(name="w", type=type_),
        "bias": WeightArgument(name="b", type=out) if bias else None,
        **(dict(zip(("x_scales", "weight_scales"), scales, strict=True)) if type_ == "fp8e4nv" else {}),
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
        sizes |= {"x_scales": ROWS, "weight_scales": N}
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
        found = np.float32(alpha) * (x.reshape(ROWS, X_STRIDE)[:, :COLUMNS] @ weight.reshape(N, COLUMNS).T)
        if "x_scales" in self.arrays:
            found *= np.outer(self.arrays["x_scales"], self.arrays["weight_scales"])
        return found + bias


@pytest.mark.parametrize(
    ("types", "bias", "alpha"),
    [
        (("fp16", "fp16"), True, 1.0),
        (("bf16", "bf16"), True, 0.5),
        (("fp16", "fp32"), False, 2.0),
        (("fp32",) * 2, 0, 1),
        (("fp8e4nv", "bf16"), True, 0.5),
        (("fp8e4nv", "fp32"), False, 1),
    ],
)
def test_the_descriptors_are_rows_times_the_transposed_weight(types: tuple[str, str], bias: bool, alpha: float) -> None:
    device, one = InterpretedDevice(), matmul(*types, bias=bias, alpha=alpha)
    operands = Operands(device, one)
    before, wanted = operands.out, operands.expected(alpha)
    numpy = Numpy()
    CublasLt(device, STREAM, numpy.load)(one, operands.addresses)(STREAM)
    assert not numpy.failed
    np.testing.assert_allclose(operands.out[:, :N], wanted, atol=UNITS[types[1]] * np.abs(wanted).max())
    np.testing.assert_array_equal(operands.out[:, N:], before[:, N:])


def test_operands_are_swapped_and_sums_are_float32_in_a_fixed_order() -> None:
    device, numpy, one = InterpretedDevice(), Numpy(), matmul("fp16", "fp32")
    operands = Operands(device, one)
    CublasLt(device, STREAM, numpy.load)(one, operands.addresses)(STREAM)
    half, single = TYPES["fp16"], TYPES["fp32"]
    assert numpy.named("matmul_desc_create") == [(COMPUTE_32F, single)]
    weight, x, out = numpy.named("matrix_layout_create")
    assert weight == (half, COLUMNS, N, COLUMNS)
    assert x == (half, COLUMNS, ROWS, X_STRIDE)
    assert out == (single, N, ROWS, OUT_STRIDE)
    preference = next(made for made in numpy.live.values() if "REDUCTION_SCHEME_MASK" in made)
    assert preference["REDUCTION_SCHEME_MASK"] == IN_FLOAT32
    assert preference["MAX_WORKSPACE_BYTES"] == WORKSPACE_BYTES
    assert {preference[f"MIN_ALIGNMENT_{operand}_BYTES"] for operand in "ABCD"} == {16}
    given = numpy.named("matmul")[0]
    assert (given[3], given[5], given[10]) == tuple(operands.addresses[name] for name in ("weight", "x", "out"))
    assert given[-2:] == (WORKSPACE_BYTES, STREAM)
    assert given[-3] in device.memory
    assert not numpy.failed


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
        match=r"'layers.0.q_proj': cuBLASLt 130100 has no algorithm for 3 x 32 x 48 \(rows, n, columns\) of fp16 to "
        r"fp16 with a bias on an interpreter .*; run `ingot tune` with this version and build with its table, or build",
    ):
        library(one, Operands(device, one).addresses)


def test_an_error_of_the_library_names_the_node() -> None:
    device, numpy, one = InterpretedDevice(), Numpy(), matmul()
    queue = CublasLt(device, STREAM, numpy.load)(one, Operands(device, one).addresses)
    numpy.refuses = True
    with pytest.raises(EngineError, match=r"cuBLASLt: queueing 'layers.0.q_proj': an internal operation failed"):
        queue(STREAM)


def test_a_missing_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise RuntimeError(f"no library {name}\n  listdir")

    finder = SimpleNamespace(load_nvidia_dynamic_lib=missing)
    monkeypatch.setattr(cublaslt, "import_module", lambda name: {"cuda.pathfinder": finder}[name])
    with pytest.raises(
        EngineError,
        match=r"cuBLASLt cannot be loaded \(no library cublasLt\): .*pip install .*\[cublas\]', or build",
    ):
        CublasLt(InterpretedDevice(), STREAM)


def test_the_real_library_takes_the_descriptors() -> None:
    """Without a GPU, which only a handle needs."""
    library = CublasLtLibrary(require_cublaslt())
    library.operation({"bias": 256, "x_scales": 512, "weight_scales": 768})
    library.preference(WORKSPACE_BYTES, 16)
    for type_ in TYPES:
        library.layout(type_, 64, 32, 64)
    with pytest.raises(EngineError, match="cuBLASLt: setting EPILOGUE: an unsupported value or parameter"):
        library._set(
            "cublasLtMatmulDescSetAttribute", library.operation({}), {"EPILOGUE": (7, c_int64)}, {"EPILOGUE": 4}
        )
    library.close()
