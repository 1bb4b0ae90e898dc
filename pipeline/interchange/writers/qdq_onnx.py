"""QDQ ONNX: the model as one standard ONNX file that plain onnxruntime runs.

    model.onnx               input_ids [batch, sequence] -> logits [batch, sequence, vocab], no cache
    weights.safetensors      its external data: codes, scales, zero points, floats

Codes are INT4, UINT4, INT8, UINT8 or float8_e4m3, dequantized by DequantizeLinear with one scale per row or per block
of columns (`block_size`); codes of 2 and 3 bits are stored in 4. Quantized activations keep the pass's QuantizeLinear
and DequantizeLinear. The compiled graph changes in four places:

    input_ids                 flattened, since the graph computes over tokens; positions count from 0 in each row
    logits_indices            removed: every position has logits
    ingot::PagedAttention     causal attention within a row, in standard operators
    ingot::RouteExperts ...   see expand_experts.py
    DequantizeLinear          INT8 weights have zero points of 0: onnxruntime's `session.x64quantprecision`, which
                              8-bit matmuls need on x86 without VNNI, fails for scales of rows or blocks without them

Opset 24: DequantizeLinear over 4-bit blocks needs 21, RMSNormalization and RotaryEmbedding need 23. Attention scores
take batch * sequence ** 2 numbers per head, so these models are for prompts, other compilers, and comparisons.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir

from ingot.errors import PassError, shown
from ingot.passes.lowering.expand_experts import expand_experts
from ingot.passes.manager import PassManager
from ingot.passes.registry import make_pass
from ingot.passes.rewriting import (
    add_constant,
    add_initializer,
    attention_operands,
    attention_sinks,
    required_input,
    value_dim,
)
from ingot.pipeline.checkpoint.json_files import write_json
from ingot.pipeline.interchange.folder import Contents, Source, WriteOptions
from ingot.pipeline.interchange.layers import lazy_tensor
from ingot.pipeline.targets.segments.onnx_files import write_model

MODEL = "model.onnx"
MADE_BY = "standalone"
_DOMAINS = {""}


def plan(source: Source, options: WriteOptions) -> Contents:
    """Write the source's graph, which only quantization has changed; writing changes it."""
    assert source.graph is not None
    return _OnnxFiles((), source)


@dataclass(frozen=True)
class _OnnxFiles(Contents):
    source: Source

    def write(self, folder: Path, name: str) -> None:
        assert self.source.graph is not None
        write_qdq_onnx(self.source.graph, folder)
        write_json(folder / "config.json", self.source.checkpoint.config)


def write_qdq_onnx(model: ir.Model, folder: Path) -> Path:
    """Write the model, which is changed by it, and return the ONNX file; one weight is in memory at a time.

    PassError for a graph that was lowered, BuildError when the disk is full.
    """
    make_standalone(model)
    PassManager([make_pass("clean-up")]).run(model)
    return write_model(model, folder / MODEL)


def make_standalone(model: ir.Model) -> None:
    """Change the model in place. PassError when a lowering left it with nonstandard operators."""
    graph = model.graph
    builder = _Builder(graph)
    builder.replace_inputs()
    for node in [node for node in graph if (node.domain, node.op_type) == ("ingot", "PagedAttention")]:
        builder.expand(node)
    builder.replace_logits()
    expand_experts(graph)
    _add_zero_points(graph)
    left = {f"{node.domain}::{node.op_type}" for node in graph} - {f"::{node.op_type}" for node in graph}
    if left:
        raise PassError(f"{MADE_BY}: {', '.join(sorted(left))} are not standard operators; export before lowering")
    for domain in set(graph.opset_imports) - _DOMAINS:
        del graph.opset_imports[domain]


def _add_zero_points(graph: ir.Graph) -> None:
    zeros: dict[ir.Value, ir.Value] = {}
    for node in graph:
        codes, scale = node.inputs[:2] if node.op_type == "DequantizeLinear" and len(node.inputs) == 2 else (None, None)
        if codes is None or codes.const_value is None or codes.dtype != ir.DataType.INT8:
            continue
        assert scale is not None
        assert scale.const_value is not None
        if scale not in zeros:
            shape = tuple(scale.const_value.shape.numpy())
            tensor = lazy_tensor(f"{scale.name}.zero", ir.DataType.INT8, shape, partial(np.zeros, shape, np.int8))
            zeros[scale] = add_initializer(graph, tensor)
        node.resize_inputs(3)
        node.replace_input_with(2, zeros[scale])


class _Builder:
    """Inserts nodes before an anchor, and holds the values that all attention nodes share."""

    def __init__(self, graph: ir.Graph) -> None:
        self.graph = graph
        self.anchor: ir.Node = graph[0]
        self.path = MADE_BY
        self.masks: dict[int, ir.Value] = {}

    def replace_inputs(self) -> None:
        """Replace the graph's inputs by input_ids, and compute the old ones from it."""
        ids, positions, indices = self.graph.inputs
        rows = ir.Value(name="rows", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(["batch", "sequence"]))
        self.shape = self._op("Shape", "shape", [rows])  # [batch, sequence]
        self.tokens = self._op("Squeeze", "sequence", [self._op("Gather", "tokens", [self.shape, self._integers(1)])])
        self.places = self._op("Range", "places", [self._scalar(0), self.tokens, self._scalar(1)])  # [sequence]
        spread = self._op("Expand", "positions.rows", [self.places, self.shape])
        self._replace(positions, self._flat("positions", spread, positions))
        for node in [use.node for use in indices.uses()]:
            source = node.inputs[0]
            assert node.op_type == "Gather"
            assert source is not None
            ir.convenience.replace_all_uses_with(node.outputs[0], source)
            self.graph.remove(node, safe=True)
        self._replace(ids, self._flat("ids", rows, ids))
        del self.graph.inputs[:]
        rows.name = "input_ids"
        self.graph.inputs.append(rows)

    def replace_logits(self) -> None:
        """Reshape logits [batch * sequence, vocab] to [batch, sequence, vocab]."""
        logits = self.graph.outputs[0]
        assert logits.shape is not None
        vocabulary, producer = logits.shape[1], logits.producer()
        assert producer is not None
        self.anchor, self.path = producer, MADE_BY
        logits.name = "logits.flat"
        target = self._op("Concat", "logits.shape", [self.shape, self._integers(-1)], axis=0)
        node = ir.node("Reshape", [logits, target], name=f"{MADE_BY}.logits")
        node.metadata_props["ingot.pass"] = MADE_BY
        self.graph.append(node)
        made = node.outputs[0]
        made.name, made.type = "logits", ir.TensorType(ir.DataType.FLOAT)
        made.shape = ir.Shape(["batch", "sequence", vocabulary])
        self.graph.outputs[0] = made

    def expand(self, node: ir.Node) -> None:
        """Replace a PagedAttention by causal attention over the tokens of each row."""
        self.anchor, self.path = node, f"{node.name}.causal"
        number = {name: int(node.attributes[name].as_int()) for name in ("num_heads", "num_kv_heads", "head_dim")}
        heads, kv_heads, head_dim = number["num_heads"], number["num_kv_heads"], number["head_dim"]
        query, key, value = required_input(node, 0), required_input(node, 1), attention_operands(node)[2]
        q = self._by_head("query", query, kv_heads, heads // kv_heads, head_dim, (0, 2, 3, 1, 4))  # [B, KV, G, S, D]
        k = self._by_head("key", key, kv_heads, 1, head_dim, (0, 2, 3, 4, 1))  # [B, KV, 1, D, S]
        width, by_row = value_dim(node), (0, 2, 3, 1, 4)
        if value is None:  # latent attention: the last dims of the keys
            whole = self._by_head("value", key, kv_heads, 1, head_dim, by_row)
            bounds = [self._integers(at) for at in (head_dim - width, head_dim, 4)]
            v = self._op("Slice", "value.part", [whole, *bounds])  # [B, KV, 1, S, V]
        else:
            v = self._by_head("value", value, kv_heads, 1, width, by_row)  # [B, KV, 1, S, V]
        scores = self._scores(q, k, node)  # [B, KV, G, S, S]
        visible = self._visible(int(node.attributes["window"].as_int()))
        masked = self._op("Where", "masked", [visible, scores, self._float(-np.inf)])
        attended = self._op("MatMul", "attended", [self._op("Softmax", "weights", [masked], axis=-1), v])
        if (sinks := attention_sinks(node)) is not None:
            by_query = self._op("Reshape", "sinks.by_head", [sinks, self._integers(kv_heads, heads // kv_heads, 1, 1)])
            everything = self._op("ReduceLogSumExp", "sinks.others", [masked, self._integers(-1)])
            others = self._op("Sigmoid", "sinks.share", [self._op("Sub", "sinks.distance", [everything, by_query])])
            attended = self._op("Mul", "sinks.attended", [attended, others])
        by_token = self._op("Transpose", "by_token", [attended], perm=(0, 3, 1, 2, 4))  # [B, S, KV, G, V]
        flat = self._op("Reshape", "flat", [by_token, self._integers(-1, heads * width)])
        self._replace(node.outputs[0], flat)
        self.graph.remove(node, safe=True)

    def _scores(self, query: ir.Value, keys: ir.Value, node: ir.Node) -> ir.Value:
        unscaled = self._op("MatMul", "product", [query, keys])
        scores = self._op("Mul", "scores", [unscaled, self._float(node.attributes["scale"].as_float())])
        softcap = node.attributes["softcap"].as_float()
        if not softcap:
            return scores
        bent = self._op("Tanh", "softcap.tanh", [self._op("Div", "softcap.div", [scores, self._float(softcap)])])
        return self._op("Mul", "softcap.mul", [bent, self._float(softcap)])

    def _visible(self, window: int) -> ir.Value:
        """Return the causal mask [sequence, sequence], built once for each window size."""
        if window not in self.masks:
            path, self.path = self.path, f"attention.window_{window}" if window else "attention.full"
            here = self._op("Unsqueeze", "here", [self.places, self._integers(1)])
            there = self._op("Unsqueeze", "there", [self.places, self._integers(0)])
            visible = self._op("LessOrEqual", "not_future", [there, here])
            if window:
                near = self._op("Less", "near", [self._op("Sub", "distance", [here, there]), self._integers(window)])
                visible = self._op("And", "visible", [visible, near])
            self.masks[window], self.path = visible, path
        return self.masks[window]

    def _by_head(
        self, what: str, x: ir.Value, kv_heads: int, group: int, head_dim: int, perm: tuple[int, ...]
    ) -> ir.Value:
        sizes = self._integers(kv_heads, group, head_dim)
        target = self._op("Concat", f"{what}.shape", [self.shape, sizes], axis=0)
        split = self._op("Reshape", f"{what}.split", [x, target])  # [B, S, KV, group, D]
        return self._op("Transpose", f"{what}.by_head", [split], perm=perm)

    def _flat(self, what: str, rows: ir.Value, like: ir.Value) -> ir.Value:
        made = self._op("Reshape", f"{what}.flat", [rows, self._integers(-1)])
        made.type, made.shape = like.type, like.shape
        return made

    def _replace(self, old: ir.Value, new: ir.Value) -> None:
        new.type, new.shape = old.type, old.shape
        ir.convenience.replace_all_uses_with(old, new)

    def _op(self, op_type: str, name: str, inputs: Sequence[ir.Value], **attributes: int | tuple[int, ...]) -> ir.Value:
        node = ir.node(op_type, inputs, attributes, name=f"{self.path}.{name}")
        node.outputs[0].name = node.name
        node.metadata_props["ingot.pass"] = MADE_BY
        self.graph.insert_before(self.anchor, node)
        return node.outputs[0]

    def _integers(self, *numbers: int) -> ir.Value:
        name = "standalone.integers." + ".".join(map(str, numbers))
        return add_constant(self.graph, name, np.array(numbers, np.int64))

    def _scalar(self, number: int) -> ir.Value:
        return add_constant(self.graph, f"standalone.integer.{number}", np.array(number, np.int64))

    def _float(self, number: float) -> ir.Value:
        return add_constant(self.graph, f"standalone.float.{shown(number)}", np.array(number, np.float32))
