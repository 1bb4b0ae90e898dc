"""A small artifact whose layers differ in heads, dims and windows and share keys and values, and what it computes.

x = table[input_ids] + places[position_ids]
x = x + W_o attention(W_q x, W_k x, W_v x)      in each layer; one that shares attends to another's keys and values
logits = W x
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray
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
from ingot.artifact.kv_geometry import KVType

VOCAB, HIDDEN, CONTEXT = 40, 24, 256


class Layer(NamedTuple):
    """One layer; `source` is the layer whose keys and values it reads."""

    heads: int
    kv_heads: int
    dim: int
    window: int
    source: int


LAYERS = (
    Layer(heads=4, kv_heads=2, dim=16, window=0, source=0),
    Layer(heads=3, kv_heads=1, dim=32, window=12, source=1),
    Layer(heads=2, kv_heads=2, dim=8, window=70, source=2),
    Layer(heads=6, kv_heads=2, dim=16, window=0, source=0),
    Layer(heads=2, kv_heads=1, dim=32, window=12, source=1),
)


def geometry(dtype: KVType = "float32", block_tokens: int = 8) -> KVGeometry:
    """The KV geometry of LAYERS."""
    return KVGeometry(
        num_layers=len(LAYERS),
        num_kv_heads=tuple(layer.kv_heads for layer in LAYERS),
        head_dim=tuple(layer.dim for layer in LAYERS),
        window=tuple(layer.window for layer in LAYERS),
        shares=tuple(layer.source for layer in LAYERS),
        block_tokens=block_tokens,
        dtype=dtype,
    )


def weights() -> dict[str, NDArray[np.float32]]:
    """Random weights [out, in] and embeddings."""
    rng = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> NDArray[np.float32]:
        return rng.standard_normal((rows, columns), dtype=np.float32) / np.float32(columns**0.5)

    made = {"table": matrix(VOCAB, HIDDEN), "places": matrix(CONTEXT, HIDDEN), "head": matrix(VOCAB, HIDDEN)}
    for number, layer in enumerate(LAYERS):
        made[f"q.{number}"] = 3 * matrix(layer.heads * layer.dim, HIDDEN)
        if layer.source == number:
            made[f"k.{number}"] = 3 * matrix(layer.kv_heads * layer.dim, HIDDEN)
            made[f"v.{number}"] = matrix(layer.kv_heads * layer.dim, HIDDEN)
        made[f"o.{number}"] = matrix(HIDDEN, layer.heads * layer.dim)
    return made


def attention_step(number: int) -> AttentionStep:
    """The attention of one layer; those that share have no key and value."""
    layer = LAYERS[number]
    own = {"key": f"k.{number}", "value": f"v.{number}"} if layer.source == number else {}
    sizes = {"num_heads": layer.heads, "num_kv_heads": layer.kv_heads, "head_dim": layer.dim, "window": layer.window}
    names = {"query": f"q.{number}", "output": f"a.{number}", **own}
    return AttentionStep.model_validate({"layer": number, "scale": layer.dim**-0.5, **names, **sizes})


def make_artifact(folder: Path, kv: KVGeometry | None = None, *, program: Program | None = None) -> Artifact:
    """Write the artifact into `folder` and open it."""
    own = _program()
    with ArtifactWriter(folder) as writer:
        (writer.path / "program").mkdir()
        for number, step in enumerate(step for step in own.steps if isinstance(step, SegmentStep)):
            onnx.save(_segment(number, step, own), writer.path / step.file)
        writer.describe(
            name="unequal",
            model=ModelFacts(
                family="test",
                num_layers=len(LAYERS),
                hidden_size=HIDDEN,
                vocab_size=VOCAB,
                context_tokens=CONTEXT,
                num_parameters=1,
            ),
            kv=kv or geometry(),
            target="cpu",
            program=program or own,
            versions={},
        )
        return open_artifact(writer.seal())


def reference_logits(tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """Logits [tokens, vocab] of one sequence in float64, by the definition."""
    w = {name: matrix.astype(np.float64) for name, matrix in weights().items()}
    x = w["table"][tokens] + w["places"][: len(tokens)]
    keys: dict[int, NDArray[np.float64]] = {}
    values: dict[int, NDArray[np.float64]] = {}
    distance = np.arange(len(tokens))[:, None] - np.arange(len(tokens))
    for number, layer in enumerate(LAYERS):
        if layer.source == number:
            keys[number] = (x @ w[f"k.{number}"].T).reshape(len(x), layer.kv_heads, layer.dim)
            values[number] = (x @ w[f"v.{number}"].T).reshape(len(x), layer.kv_heads, layer.dim)
        query = (x @ w[f"q.{number}"].T).reshape(len(x), layer.heads, layer.dim)
        group = layer.heads // layer.kv_heads
        k, v = (each[layer.source].repeat(group, axis=1) for each in (keys, values))
        seen = (distance >= 0) & (distance < (layer.window or len(x)))
        scores = np.where(seen, np.einsum("ihd,jhd->hij", query, k) * layer.dim**-0.5, -np.inf)
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        shares /= shares.sum(axis=-1, keepdims=True)
        x = x + np.einsum("hij,jhd->ihd", shares, v).reshape(len(x), -1) @ w[f"o.{number}"].T
    logits: NDArray[np.float64] = x @ w["head"].T
    return logits


def _program() -> Program:
    """A segment, the attention of layer 0, a segment, and so on."""
    values = {
        "input_ids": ValueFacts(dtype="int64", rows="tokens", columns=0),
        "position_ids": ValueFacts(dtype="int64", rows="tokens", columns=0),
        "logits_indices": ValueFacts(dtype="int64", rows="logits", columns=0),
        "logits": ValueFacts(dtype="float32", rows="logits", columns=VOCAB),
    }
    steps: list[SegmentStep | AttentionStep] = []
    for number, layer in enumerate(LAYERS):
        attention = attention_step(number)
        before = ("input_ids", "position_ids") if number == 0 else (f"a.{number - 1}", f"x.{number - 1}")
        made = (f"x.{number}", *attention.inputs)
        steps += [SegmentStep(file=f"program/segment-{number}.onnx", inputs=before, outputs=made), attention]
        columns = {
            f"x.{number}": HIDDEN,
            f"q.{number}": layer.heads * layer.dim,
            f"a.{number}": layer.heads * layer.dim,
        }
        columns |= dict.fromkeys(attention.inputs[1:], layer.kv_heads * layer.dim)
        values |= {name: ValueFacts(dtype="float32", rows="tokens", columns=n) for name, n in columns.items()}
    last = len(LAYERS) - 1
    inputs = (f"a.{last}", f"x.{last}", "logits_indices")
    steps.append(SegmentStep(file=f"program/segment-{len(LAYERS)}.onnx", inputs=inputs, outputs=("logits",)))
    return Program(steps=tuple(steps), values=values)


def _segment(number: int, step: SegmentStep, program: Program) -> onnx.ModelProto:
    nodes, used = [], weights()
    if number == 0:
        nodes.append(helper.make_node("Gather", ["table", "input_ids"], ["embedded"]))
        nodes.append(helper.make_node("Gather", ["places", "position_ids"], ["placed"]))
        nodes.append(helper.make_node("Add", ["embedded", "placed"], ["x.0"]))
    else:
        before = number - 1
        made = f"x.{number}" if number < len(LAYERS) else "x"
        nodes.append(helper.make_node("Gemm", [f"a.{before}", f"o.{before}"], ["projected"], transB=1))
        nodes.append(helper.make_node("Add", [f"x.{before}", "projected"], [made]))
    if number < len(LAYERS):
        for name in step.outputs[1:]:
            nodes.append(helper.make_node("Gemm", [f"x.{number}", f"{name}.w"], [name], transB=1))
    else:
        nodes.append(helper.make_node("Gather", ["x", "logits_indices"], ["chosen"]))
        nodes.append(helper.make_node("Gemm", ["chosen", "head"], ["logits"], transB=1))
    read = {name for node in nodes for name in node.input}
    stored = {name if name not in step.outputs else f"{name}.w": array for name, array in used.items()}
    tensors = [numpy_helper.from_array(array, name) for name, array in stored.items() if name in read]
    inputs, outputs = ([_info(name, program.values[name]) for name in names] for names in (step.inputs, step.outputs))
    graph = helper.make_graph(nodes, "segment", inputs, outputs, tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def _info(name: str, facts: ValueFacts) -> onnx.ValueInfoProto:
    rows = "T" if facts.rows == "tokens" else "R"
    kind = TensorProto.INT64 if facts.dtype == "int64" else TensorProto.FLOAT
    return helper.make_tensor_value_info(name, kind, [rows, facts.columns] if facts.columns else [rows])
