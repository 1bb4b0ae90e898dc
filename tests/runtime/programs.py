"""Small artifacts for tests of the CPU executor, built from ONNX nodes: two layers of attention, no norms."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ingot.artifact import (
    Artifact,
    ArtifactWriter,
    AttentionStep,
    KVGeometry,
    ModelFacts,
    Program,
    SegmentStep,
    ValueFacts,
    open_artifact,
)

VOCAB, HIDDEN, HEADS, KV_HEADS, DIM = 50, 64, 4, 2, 16
_TYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "int64": TensorProto.INT64}

VALUES = {
    "input_ids": ValueFacts(dtype="int64", rows="tokens", columns=0),
    "position_ids": ValueFacts(dtype="int64", rows="tokens", columns=0),
    "logits_indices": ValueFacts(dtype="int64", rows="logits", columns=0),
    "logits": ValueFacts(dtype="float32", rows="logits", columns=VOCAB),
    **{f"x.{i}": ValueFacts(dtype="float32", rows="tokens", columns=HIDDEN) for i in range(2)},
    **{f"q.{i}": ValueFacts(dtype="float32", rows="tokens", columns=HEADS * DIM) for i in range(2)},
    **{f"k.{i}": ValueFacts(dtype="float32", rows="tokens", columns=KV_HEADS * DIM) for i in range(2)},
    **{f"v.{i}": ValueFacts(dtype="float32", rows="tokens", columns=KV_HEADS * DIM) for i in range(2)},
    **{f"a.{i}": ValueFacts(dtype="float32", rows="tokens", columns=HEADS * DIM) for i in range(2)},
}


@dataclass(frozen=True)
class Weights:
    """Storage of the weights of 64-column projections: float32, or 4 or 8 bits in blocks."""

    bits: Literal[4, 8, 32] = 32
    block: int = 32


def attention_step(layer: int) -> AttentionStep:
    """The attention of one layer."""
    return AttentionStep(
        layer=layer, query=f"q.{layer}", key=f"k.{layer}", value=f"v.{layer}", output=f"a.{layer}",
        num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, scale=DIM**-0.5,
    )  # fmt: skip


PROGRAM = Program(
    steps=(
        SegmentStep(
            file="program/segment-000.onnx",
            inputs=("input_ids", "position_ids"),
            outputs=("x.0", "q.0", "k.0", "v.0"),
        ),
        attention_step(0),
        SegmentStep(file="program/segment-001.onnx", inputs=("a.0", "x.0"), outputs=("x.1", "q.1", "k.1", "v.1")),
        attention_step(1),
        SegmentStep(file="program/segment-002.onnx", inputs=("a.1", "x.1", "logits_indices"), outputs=("logits",)),
    ),
    values=VALUES,
)


def make_artifact(folder: Path, weights: Weights | None = None, program: Program = PROGRAM) -> Artifact:
    """Write the small model as an artifact into `folder` and open it."""
    with ArtifactWriter(folder) as writer:
        (writer.path / "program").mkdir()
        for name, model in _segments(weights or Weights()).items():
            onnx.save(model, writer.path / "program" / name)
        writer.describe(
            name="small",
            model=ModelFacts(
                family="test", num_layers=2, hidden_size=HIDDEN, vocab_size=VOCAB, context_tokens=256, num_parameters=1
            ),
            kv=KVGeometry(num_layers=2, num_kv_heads=KV_HEADS, head_dim=DIM, block_tokens=8),
            target="cpu",
            program=program,
            versions={},
        )
        return open_artifact(writer.seal())


class _Segment:
    """Collects the nodes and weights of one segment."""

    def __init__(self, weights: Weights, seed: int) -> None:
        self._weights, self._rng = weights, np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []

    def add(self, op: str, inputs: list[str], output: str, **attributes: int) -> str:
        domain = "com.microsoft" if op == "MatMulNBits" else ""
        node = helper.make_node(op, inputs, [output], domain=domain)
        node.attribute.extend(helper.make_attribute(key, value) for key, value in attributes.items())
        self.nodes.append(node)
        return output

    def constant(self, name: str, array: np.ndarray) -> str:
        self.initializers.append(numpy_helper.from_array(array, name))
        return name

    def project(self, x: str, columns: int, output: str) -> str:
        """output = x @ W with a random W of the chosen kind."""
        bits, block = self._weights.bits, self._weights.block
        if bits == 32:
            weight = self._rng.standard_normal((columns, HIDDEN), dtype=np.float32) / 8
            return self.add("Gemm", [x, self.constant(f"{output}.w", weight)], output, transB=1)
        blocks = -(-HIDDEN // block)
        packed = self._rng.integers(0, 256, (columns, blocks, block * bits // 8), dtype=np.uint8)
        scale = (self._rng.random((columns, blocks), dtype=np.float32) + 0.5) / (8 * 2 ** (bits - 2))
        names = [x, self.constant(f"{output}.q", packed), self.constant(f"{output}.s", scale.reshape(-1))]
        sizes = {"K": HIDDEN, "N": columns, "bits": bits, "block_size": block, "accuracy_level": 4}
        return self.add("MatMulNBits", names, output, **sizes)

    def model(self, step: SegmentStep, values: Mapping[str, ValueFacts] = VALUES) -> onnx.ModelProto:
        graph = helper.make_graph(
            self.nodes,
            "segment",
            [_info(name, values[name]) for name in step.inputs],
            [_info(name, values[name]) for name in step.outputs],
            self.initializers,
        )
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def _info(name: str, facts: ValueFacts) -> onnx.ValueInfoProto:
    rows = "T" if facts.rows == "tokens" else "R"
    return helper.make_tensor_value_info(name, _TYPES[facts.dtype], [rows, facts.columns] if facts.columns else [rows])


def _segments(weights: Weights) -> dict[str, onnx.ModelProto]:
    segments = [_Segment(weights, seed) for seed in range(3)]
    first, middle, last = segments
    table = np.random.default_rng(9).standard_normal((VOCAB, HIDDEN), dtype=np.float32)
    places = np.random.default_rng(8).standard_normal((256, HIDDEN), dtype=np.float32)
    first.add("Gather", [first.constant("table", table), "input_ids"], "embedded")
    first.add("Gather", [first.constant("places", places), "position_ids"], "placed")
    first.add("Add", ["embedded", "placed"], "x.0")
    middle.add("Add", ["x.0", middle.project("a.0", HIDDEN, "o.0")], "x.1")
    last.add("Add", ["x.1", last.project("a.1", HIDDEN, "o.1")], "x.2")
    last.project(last.add("Gather", ["x.2", "logits_indices"], "chosen"), VOCAB, "logits")
    for layer, segment in enumerate((first, middle)):
        segment.project(f"x.{layer}", HEADS * DIM, f"q.{layer}")
        segment.project(f"x.{layer}", KV_HEADS * DIM, f"k.{layer}")
        segment.project(f"x.{layer}", KV_HEADS * DIM, f"v.{layer}")
    steps = [step for step in PROGRAM.steps if isinstance(step, SegmentStep)]
    return {Path(step.file).name: s.model(step) for step, s in zip(steps, segments, strict=True)}
