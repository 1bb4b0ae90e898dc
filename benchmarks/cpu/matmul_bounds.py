"""The lower bound of a decode step with onnxruntime's own 4-bit kernel: the time of its matmuls alone.

Builds a model whose only nodes are the layers' MatMulNBits, each with weights of its own, and times one run of all of
them for several row counts, block sizes and forms of the output head. No engine on top of onnxruntime can be faster;
compared with a peer's whole step, it shows where the kernel decides. Needs onnx and onnxruntime only:

    python -m benchmarks.cpu.matmul_bounds --shape smollm2-135m --threads 2
"""

import json
import statistics
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import onnx
import onnxruntime  # type: ignore[import-untyped]
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from benchmarks.shapes import SHAPES, Linear, ModelShape

INT8_ACTIVATIONS = 4  # accuracy_level: activations are quantized to int8, block by block


@dataclass(frozen=True)
class Form:
    """How the weights are stored: bits and block size of the layers, bits of the head (0: no head)."""

    bits: int
    block_size: int
    head_bits: int

    def __str__(self) -> str:
        return f"int{self.bits} block {self.block_size}, head " + (f"int{self.head_bits}" if self.head_bits else "none")


@dataclass(frozen=True)
class Timing:
    """Seconds of one run over all matrices: the best and the median."""

    best: float
    median: float


FORMS = (
    Form(4, 32, 0),
    Form(4, 64, 0),
    Form(4, 128, 0),
    Form(4, 32, 4),
    Form(4, 128, 4),
    Form(4, 32, 8),
    Form(4, 128, 8),
    Form(8, 32, 8),
    Form(8, 128, 8),
)


def weight_bytes(shape: ModelShape, form: Form) -> int:
    """Bytes of the packed weights and their float32 scales, which one run reads."""
    layers = shape.num_layers * sum(_packed_bytes(one, form.bits, form.block_size) for one in shape.layer_linears)
    return layers + (_packed_bytes(shape.head, form.head_bits, form.block_size) if form.head_bits else 0)


def _packed_bytes(linear: Linear, bits: int, block_size: int) -> int:
    blocks = linear.out_features * -(-linear.in_features // block_size)
    return blocks * (block_size * bits // 8 + 4)


def make_session(shape: ModelShape, form: Form, threads: int) -> onnxruntime.InferenceSession:
    """A session over a model of matmuls alone; its inputs are named after their width."""
    random = np.random.default_rng(0)
    linears = [
        (f"layer{layer}.{one.name}", one, form.bits) for layer in range(shape.num_layers) for one in shape.layer_linears
    ]
    if form.head_bits:
        linears.append(("lm_head", shape.head, form.head_bits))
    nodes, weights = [], []
    for name, linear, bits in linears:
        weights += _weights(name, linear, bits, form.block_size, random)
        nodes.append(_node(name, linear, bits, form.block_size))
    widths = sorted({linear.in_features for _, linear, _ in linears})
    inputs = [helper.make_tensor_value_info(f"x{width}", TensorProto.FLOAT, ["M", width]) for width in widths]
    outputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["M", linear.out_features])
        for name, linear, _ in linears
    ]
    graph = helper.make_graph(nodes, shape.name, inputs, outputs, weights)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return _load(helper.make_model(graph, opset_imports=opsets, ir_version=10), threads)


def _node(name: str, linear: Linear, bits: int, block_size: int) -> onnx.NodeProto:
    return helper.make_node(
        "MatMulNBits",
        [f"x{linear.in_features}", f"{name}.q", f"{name}.scale"],
        [name],
        domain="com.microsoft",
        K=linear.in_features,
        N=linear.out_features,
        bits=bits,
        block_size=block_size,
        accuracy_level=INT8_ACTIVATIONS,
    )


def _weights(
    name: str, linear: Linear, bits: int, block_size: int, random: np.random.Generator
) -> list[onnx.TensorProto]:
    blocks = -(-linear.in_features // block_size)
    packed = random.integers(0, 256, (linear.out_features, blocks, block_size * bits // 8), dtype=np.uint8)
    scales = np.full((linear.out_features, blocks), 0.01, dtype=np.float32)
    return [numpy_helper.from_array(packed, f"{name}.q"), numpy_helper.from_array(scales, f"{name}.scale")]


def _load(model: onnx.ModelProto, threads: int) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        onnx.save(model, path)
        return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def time_session(session: onnxruntime.InferenceSession, rows: int, seconds: float) -> Timing:
    """Run for about `seconds` (at least three times, after one warm-up); io binding keeps results in place."""
    binding = session.io_binding()
    for value in session.get_inputs():
        array: NDArray[np.float32] = np.ones((rows, value.shape[1]), dtype=np.float32)
        binding.bind_cpu_input(value.name, array)
    for value in session.get_outputs():
        buffer = onnxruntime.OrtValue.ortvalue_from_shape_and_type([rows, value.shape[1]], np.float32, "cpu")
        binding.bind_ortvalue_output(value.name, buffer)
    session.run_with_iobinding(binding)
    times: list[float] = []
    while len(times) < 3 or sum(times) < seconds:
        start = time.perf_counter()
        session.run_with_iobinding(binding)
        times.append(time.perf_counter() - start)
    return Timing(min(times), statistics.median(times))


def measure(
    shape: ModelShape, forms: Iterable[Form], threads: int, rows: Iterable[int], seconds: float
) -> list[dict[str, object]]:
    """One record per form and row count."""
    records: list[dict[str, object]] = []
    for form in forms:
        session = make_session(shape, form, threads)
        for count in rows:
            timing = time_session(session, count, seconds)
            record: dict[str, object] = {"shape": shape.name, "form": str(form), "threads": threads, "rows": count}
            record |= {"best_ms": timing.best * 1e3, "median_ms": timing.median * 1e3}
            record["gigabytes_per_second"] = weight_bytes(shape, form) / timing.median / 1e9
            records.append(record)
            click.echo(
                f"{shape.name} {form} threads {threads} rows {count}: best {timing.best * 1e3:.2f} ms, "
                f"median {timing.median * 1e3:.2f} ms, {record['gigabytes_per_second']:.1f} GB/s of weights"
            )
    return records


@click.command(help=__doc__)
@click.option("--shape", "shape_names", multiple=True, type=click.Choice(sorted(SHAPES)), help="Default: all.")
@click.option(
    "--threads", "thread_counts", multiple=True, type=click.IntRange(min=1), default=(1, 2), show_default=True
)
@click.option("--rows", "row_counts", multiple=True, type=click.IntRange(min=1), default=(1, 2, 8), show_default=True)
@click.option("--seconds", type=float, default=1.5, show_default=True, help="Time spent on each figure.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the records here as well.")
def main(
    shape_names: tuple[str, ...],
    thread_counts: tuple[int, ...],
    row_counts: tuple[int, ...],
    seconds: float,
    json_path: Path | None,
) -> None:
    """Measure every form of every shape and print as it goes."""
    records: list[dict[str, object]] = []
    for name in shape_names or tuple(SHAPES):
        for threads in thread_counts:
            records += measure(SHAPES[name], FORMS, threads, row_counts, seconds)
    if json_path is not None:
        json_path.write_text(json.dumps(records, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
