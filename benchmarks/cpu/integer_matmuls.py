"""Find the fastest way of onnxruntime to multiply 8-bit weights, from float32 inputs to float32 results.

All four matrices of a decoder layer, in the forms below, rounds interleaved, best of all rounds: a busy machine makes a
round slower, never faster. Weights are int8 per channel everywhere; only speed is measured.

    Gemm                    float32 weights
    MatMulNBits             only weights in 8 bits, blocks of 32 or 128; accuracy_level 4 rounds inputs block by block
    dynamic, OPS, A x B     inputs to type A with a scale per token, then the integer matmul with weights of type B
    static, OPS, A x B      the same with one constant scale; DynamicQuantizeMatMul has one per batch

    python -m benchmarks.cpu.integer_matmuls --shape smollm2-135m
"""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx
import onnxruntime  # type: ignore[import-untyped]
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from benchmarks.device import device_facts
from benchmarks.shapes import SHAPES, Linear
from ingot.pipeline.compile import tool_versions

ROWS = (1, 8, 64, 512)
TYPES = {"u8": (TensorProto.UINT8, np.uint8, 128), "s8": (TensorProto.INT8, np.int8, 0)}
MICROSOFT = "com.microsoft"
_CALLS = 32  # of a timing, over the rows of a call


@dataclass(frozen=True)
class Form:
    """One form. inputs, weights: types of the codes; block: of MatMulNBits."""

    name: str
    op: str
    dynamic: bool = False
    inputs: str = "u8"
    weights: str = "s8"
    block: int = 0


FORMS = (
    Form("Gemm, float32", "Gemm"),
    Form("MatMulNBits, block 32", "MatMulNBits", block=32),
    Form("MatMulNBits, block 128", "MatMulNBits", block=128),
    Form("dynamic, MatMulInteger, u8 x s8", "MatMulInteger", dynamic=True),
    Form("dynamic, MatMulIntegerToFloat, u8 x s8", "MatMulIntegerToFloat", dynamic=True),
    Form("dynamic, QGemm, u8 x s8", "QGemm", dynamic=True),
    Form("dynamic, QGemm, u8 x u8", "QGemm", dynamic=True, weights="u8"),
    Form("dynamic, MatMulIntegerToFloat, s8 x s8", "MatMulIntegerToFloat", dynamic=True, inputs="s8"),
    Form("static, MatMulIntegerToFloat, u8 x s8", "MatMulIntegerToFloat"),
    Form("static, QGemm, u8 x s8", "QGemm"),
    Form("static, QGemm, u8 x u8", "QGemm", weights="u8"),
    Form("static per batch, DynamicQuantizeMatMul, s8", "DynamicQuantizeMatMul"),
)


@dataclass
class Graph:
    """Nodes and initializers of a graph under construction."""

    nodes: list[onnx.NodeProto] = field(default_factory=list)
    initializers: list[onnx.TensorProto] = field(default_factory=list)

    def constant(self, name: str, array: Any) -> str:
        """Add an initializer of that name."""
        self.initializers.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def node(self, op: str, inputs: Sequence[str], output: str, domain: str = "", **attributes: Any) -> str:
        """A node with one output."""
        self.nodes.append(helper.make_node(op, inputs, [output], domain=domain, **attributes))
        return output


def build(form: Form, linear: Linear) -> bytes:
    """Write y [T, out] from x [T, in] in that form as an ONNX file."""
    graph = Graph()
    rng = np.random.default_rng(0)
    codes = rng.integers(-127, 128, (linear.out_features, linear.in_features)).astype(np.int8)
    scale = rng.uniform(0.001, 0.002, linear.out_features).astype(np.float32)
    if form.op == "Gemm":
        graph.node("Gemm", ["x", graph.constant("w", codes * scale[:, None])], "y", transB=1)
    elif form.op == "MatMulNBits":
        _nbits(graph, form, codes, scale)
    elif form.op == "DynamicQuantizeMatMul":
        weight = graph.constant("w", np.ascontiguousarray(codes.T))
        graph.node(form.op, ["x", weight, graph.constant("w_scale", scale)], "y", MICROSOFT)
    else:
        _integer(graph, form, codes, scale)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["T", linear.in_features])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["T", linear.out_features])
    made = helper.make_graph(graph.nodes, "one", [x], [y], graph.initializers)
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid(MICROSOFT, 1)]
    content: bytes = helper.make_model(made, opset_imports=opsets, ir_version=11).SerializeToString()
    return content


def _nbits(graph: Graph, form: Form, codes: NDArray[np.int8], scale: NDArray[np.float32]) -> None:
    rows, columns = codes.shape
    blocks = -(-columns // form.block)
    packed = np.full((rows, blocks * form.block), 128, np.uint8)
    packed[:, :columns] = codes.astype(np.int16) + 128
    weight = graph.constant("w", packed.reshape(rows, blocks, form.block))
    scales = graph.constant("w_scale", np.repeat(scale[:, None], blocks, axis=1))
    sizes = {"K": columns, "N": rows, "bits": 8, "block_size": form.block, "accuracy_level": 4}
    graph.node("MatMulNBits", ["x", weight, scales], "y", MICROSOFT, **sizes)


def _integer(graph: Graph, form: Form, codes: NDArray[np.int8], scale: NDArray[np.float32]) -> None:
    _, dtype, zero = TYPES[form.weights]
    stored = (codes.astype(np.int16) + zero).astype(dtype)
    weight = graph.constant("w", stored if form.op == "QGemm" else np.ascontiguousarray(stored.T))
    scales = graph.constant("w_scale", scale)
    input_scale = _dynamic_codes(graph, form) if form.dynamic else _static_codes(graph, form)
    factor = graph.constant("one", np.float32(1)) if form.dynamic else input_scale
    result = "matmul" if form.dynamic else "y"
    if form.op == "QGemm":
        zeros = graph.constant("w_zero", np.full(len(scale), zero, dtype))
        graph.node(form.op, ["codes", factor, "zero", weight, scales, zeros], result, MICROSOFT, transB=1)
    elif form.op == "MatMulIntegerToFloat":
        inputs = ["codes", weight, factor, scales, "zero", graph.constant("w_zero", dtype(zero))]
        graph.node(form.op, inputs, result, MICROSOFT)
    else:
        graph.node(form.op, ["codes", weight, "zero", graph.constant("w_zero", dtype(zero))], "sums")
        graph.node("Cast", ["sums"], "floats", to=TensorProto.FLOAT)
        graph.node("Mul", ["floats", scales], result)
    if form.dynamic:
        graph.node("Mul", ["matmul", graph.node("Unsqueeze", [input_scale, "axes"], "column")], "y")


def _static_codes(graph: Graph, form: Form) -> str:
    _, dtype, zero = TYPES[form.inputs]
    scale = graph.constant("scale", np.float32(0.03))
    graph.node("QuantizeLinear", ["x", scale, graph.constant("zero", dtype(zero))], "codes")
    return scale


def _dynamic_codes(graph: Graph, form: Form) -> str:
    kind, dtype, zero = TYPES[form.inputs]
    axes, least = graph.constant("axes", np.array([1])), graph.constant("least", np.float32(1e-30))
    graph.constant("zero", dtype(zero))
    peak = graph.node("ReduceMax", [graph.node("Abs", ["x"], "size"), axes], "peak", keepdims=0)
    bounded = graph.node("Max", [peak, least], "bounded")
    scale = graph.node("Div", [bounded, graph.constant("largest", np.float32(127))], "scale")
    if zero == 0:
        graph.node("QuantizeLinear", ["x", scale], "codes", axis=0, output_dtype=kind)
        return scale
    shape = graph.node("Shape", [scale], "shape")
    zeros = graph.node("Expand", [graph.constant("one_zero", np.array([zero], dtype)), shape], "zeros")
    graph.node("QuantizeLinear", ["x", scale, zeros], "codes", axis=0)
    return scale


def measure(linears: Sequence[Linear], rounds: int) -> dict[str, dict[int, float]]:
    """Form -> rows -> microseconds of all matrices together, each at its best."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3  # errors only: some forms have a constant that they do not use
    sessions = {
        (form.name, linear): onnxruntime.InferenceSession(build(form, linear), options)
        for form in FORMS
        for linear in linears
    }
    best: dict[tuple[str, Linear, int], float] = {}
    for _ in range(rounds):
        for (name, linear), session in sessions.items():
            for rows, seconds in _timings(session, linear):
                key = name, linear, rows
                best[key] = min(best.get(key, seconds), seconds)
    return {
        form.name: {rows: 1e6 * sum(best[form.name, linear, rows] for linear in linears) for rows in ROWS}
        for form in FORMS
    }


def _timings(session: Any, linear: Linear) -> Iterator[tuple[int, float]]:
    rng = np.random.default_rng(1)
    for rows in ROWS:
        x = rng.standard_normal((rows, linear.in_features), dtype=np.float32)
        calls = max(1, _CALLS // rows)
        start = time.perf_counter()
        for _ in range(calls):
            session.run(None, {"x": x})
        yield rows, (time.perf_counter() - start) / calls


@click.command(help=__doc__)
@click.option("--shape", type=click.Choice(list(SHAPES)), default="smollm2-135m", show_default=True)
@click.option("--rounds", default=10, show_default=True)
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path))
def main(shape: str, rounds: int, json_file: Path | None) -> None:
    """Entry point; see the module's docstring."""
    found = measure(SHAPES[shape].layer_linears, rounds)
    click.echo("| microseconds | " + " | ".join(f"{rows} rows" for rows in ROWS) + " |\n|---|---|---|---|---|")
    for name, by_rows in found.items():
        click.echo(f"| {name} | " + " | ".join(f"{by_rows[rows]:,.0f}" for rows in ROWS) + " |")
    if json_file:
        document = {"shape": shape, "device": device_facts(), "versions": tool_versions(), "microseconds": found}
        json_file.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
