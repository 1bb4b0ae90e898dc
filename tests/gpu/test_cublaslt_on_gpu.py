"""Matmuls by cuBLASLt on a GPU: against float64, replayed from a graph, the same bits each time."""

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from ingot.artifact.programs.launch_program import BufferArgument, LibraryMatmul, WeightArgument
from ingot.runtime.cuda.cublaslt import CublasLt
from ingot.runtime.cuda.driver.device import Device
from ingot.runtime.cuda.driver.driver import open_device
from tests.gpu.conftest import require_cublaslt

pytestmark = pytest.mark.gpu

DTYPES: dict[str, Any] = {
    "fp32": np.float32,
    "fp16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "fp8e4nv": ml_dtypes.float8_e4m3fn,
}
TYPES = [("fp16", "fp16"), ("bf16", "bf16"), ("fp16", "fp32"), ("bf16", "fp32"), ("fp32", "fp32")]
CASES = [(types, bias) for types in TYPES for bias in (False, True) if types[0] == types[1] or not bias]
# Of the largest result: a step of its type; for float32 the error of tensor cores, which truncate when they add.
UNITS = {"fp32": 2.0**-14, "fp16": 2.0**-10, "bf16": 2.0**-7}
WIDER = 64  # elements of a row beyond its columns


@pytest.fixture(scope="module")
def device(gpu_sm: int) -> Iterator[Device]:
    require_cublaslt()
    opened = open_device()
    yield opened
    opened.close()


class Multiplied:
    """A matmul with random operands on the GPU."""

    def __init__(self, device: Device, rows: int, n: int, columns: int, types: tuple[str, str], bias: bool) -> None:
        self.device, self.stream, rng = device, device.make_stream(), np.random.default_rng(0)
        self.shape, self.out_type = (rows, n), np.dtype(DTYPES[types[1]])
        given = {"x": (rows, columns + WIDER), "weight": (n, columns), **({"bias": (n,)} if bias else {})}
        scales = {"x_scales": (rows,), "weight_scales": (n,)} if types[0] == "fp8e4nv" else {}
        kinds = {"x": types[0], "weight": types[0], "bias": types[1], **dict.fromkeys(scales, "fp32")}
        given |= scales
        self.values = {name: rng.standard_normal(size).astype(DTYPES[kinds[name]]) for name, size in given.items()}
        self.addresses = {name: self._send(value) for name, value in self.values.items()}
        self.addresses["out"] = device.allocate(rows * n * self.out_type.itemsize, "out")
        self.matmul = LibraryMatmul(
            rows=rows,
            n=n,
            columns=columns,
            x=BufferArgument(name="x", type=types[0]),
            weight=WeightArgument(name="weight", type=types[0]),
            bias=WeightArgument(name="bias", type=types[1]) if bias else None,
            x_scales=BufferArgument(name="x_scales", type="fp32") if scales else None,
            weight_scales=WeightArgument(name="weight_scales", type="fp32") if scales else None,
            out=BufferArgument(name="out", type=types[1]),
            x_stride=columns + WIDER,
            out_stride=n,
            alpha=0.5,
            node="a matmul",
        )

    def expected(self) -> NDArray[np.float64]:
        x, weight = (self.values[name].astype(np.float64) for name in ("x", "weight"))
        bias = self.values["bias"].astype(np.float64) if "bias" in self.values else 0.0
        result: NDArray[np.float64] = 0.5 * x[:, :-WIDER] @ weight.T
        if "x_scales" in self.values:
            result *= np.outer(self.values["x_scales"], self.values["weight_scales"])
        return result + bias

    def result(self) -> NDArray[Any]:
        """Read the result [rows, n] and clear it on the GPU, so that every run must write it again."""
        pinned = self.device.allocate_pinned(int(np.prod(self.shape)) * self.out_type.itemsize, "out")
        self.device.copy_out(pinned, self.addresses["out"], self.stream)
        self.device.clear(self.addresses["out"], pinned.size, self.stream)
        self.device.synchronize("a matmul")
        result: NDArray[Any] = pinned.view(self.out_type).reshape(self.shape)
        return result

    def _send(self, value: NDArray[Any]) -> int:
        pinned = self.device.allocate_pinned(value.nbytes, "an operand")
        pinned[:] = value.reshape(-1).view(np.uint8)
        address = self.device.allocate(value.nbytes, "an operand")
        self.device.copy_in(address, pinned, self.stream)
        self.device.synchronize("an operand")
        return address


@pytest.mark.parametrize(("types", "bias"), CASES)
@pytest.mark.parametrize(("rows", "n", "columns"), [(1, 96, 64), (7, 1000, 344), (64, 2048, 2048), (300, 512, 4096)])
def test_a_matmul_is_as_close_to_float64_as_its_type_and_a_graph_repeats_it(
    device: Device, types: tuple[str, str], rows: int, n: int, columns: int, bias: bool
) -> None:
    check(Multiplied(device, rows, n, columns, types, bias), UNITS[types[1]])


@pytest.mark.parametrize(("out_type", "bias"), [("bf16", True), ("fp16", False), ("fp32", False)])
@pytest.mark.parametrize(("rows", "n", "columns"), [(65, 96, 64), (300, 512, 4096), (4096, 2048, 2048)])
def test_float8_has_the_scales_of_its_rows_and_of_the_weights(
    device: Device, gpu_sm: int, out_type: str, rows: int, n: int, columns: int, bias: bool
) -> None:
    if gpu_sm != 90:
        pytest.skip(f"scales of rows need SM 90, and this is SM {gpu_sm}")
    # Sums of float8 have 14 bits until they are added to those before.
    check(Multiplied(device, rows, n, columns, ("fp8e4nv", out_type), bias), max(UNITS[out_type], 2.0**-11))


def check(one: Multiplied, unit: float) -> None:
    """Multiply at once and from a graph; `unit` is the error allowed, of the largest result."""
    device, library = one.device, CublasLt(one.device, one.stream)
    queue, wanted = library(one.matmul, one.addresses), one.expected()
    queue(one.stream)
    found = one.result()
    assert np.abs(found.astype(np.float64) - wanted).max() <= unit * np.abs(wanted).max()
    graph = device.capture(one.stream, queue)
    for _ in range(3):
        device.replay(graph, one.stream)
        np.testing.assert_array_equal(one.result(), found)
    library.close()
    for address in one.addresses.values():
        device.free(address)
