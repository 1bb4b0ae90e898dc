"""A small handmade decoder of two layers with every op of the IR, for tests of passes and of program writers."""

from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

FLOAT, INT64 = ir.DataType.FLOAT, ir.DataType.INT64
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCAB, POSITIONS = 64, 4, 2, 16, 172, 96, 64


class TinyDecoder:
    """Builds the model node by node, with random weights from a fixed seed, stored as `weight_dtype`."""

    def __init__(self, tied: bool = True, weight_dtype: Any = np.float16, layers: int = 2) -> None:
        self._random = np.random.default_rng(7)
        self._dtype = weight_dtype
        self._nodes: list[ir.Node] = []
        self._initializers: dict[str, ir.Value] = {}
        self.input_ids = value("input_ids", INT64, "T")
        self.position_ids = value("position_ids", INT64, "T")
        self.logits_indices = value("logits_indices", INT64, "R")
        logits = self._decoder(layers, tied)
        graph = ir.Graph(
            [self.input_ids, self.position_ids, self.logits_indices],
            [logits],
            nodes=self._nodes,
            initializers=list(self._initializers.values()),
            opset_imports={"": 24, "com.microsoft": 1, "ingot": 1},
            name="tiny",
        )
        self.model = ir.Model(graph, ir_version=11)

    def _decoder(self, layers: int, tied: bool) -> ir.Value:
        table = self.weight("model.embed_tokens.weight", VOCAB, HIDDEN)
        x = self.node("embed_tokens", "Gather", [table, self.input_ids], ("T", HIDDEN), axis=0)
        rows = self.node("positions", "Unsqueeze", [self.position_ids, self.constant("zero", [0])], (1, "T"))
        rows.dtype = INT64
        for layer in range(layers):
            x = self._layer(layer, x, rows)
        x = self.node("last", "Gather", [x, self.logits_indices], ("R", HIDDEN), axis=0)
        head = table if tied else self.weight("lm_head.weight", VOCAB, HIDDEN)
        x = self._norm("norm", x, "R")
        return self.node("lm_head", "Gemm", [x, head], ("R", VOCAB), output="logits", transB=1)

    def _layer(self, layer: int, x: ir.Value, rows: ir.Value) -> ir.Value:
        at = f"layers.{layer}"
        normed = self._norm(f"{at}.input_layernorm", x, "T")
        query = self._rope(f"{at}.q", self.linear(f"{at}.q_proj", normed, HEADS * HEAD_DIM, bias=True), HEADS, rows)
        key = self._rope(f"{at}.k", self.linear(f"{at}.k_proj", normed, KV_HEADS * HEAD_DIM), KV_HEADS, rows)
        val = self.linear(f"{at}.v_proj", normed, KV_HEADS * HEAD_DIM)
        attended = self.attention(layer, query, key, val)
        x = self.node(f"{at}.add", "Add", [x, self.linear(f"{at}.o_proj", attended, HIDDEN)], ("T", HIDDEN))
        normed = self._norm(f"{at}.post_attention_layernorm", x, "T")
        gate = self.linear(f"{at}.gate_proj", normed, INNER)
        up = self.linear(f"{at}.up_proj", normed, INNER)
        silu = self.node(f"{at}.silu", "Swish", [gate], ("T", INNER))
        inner = self.node(f"{at}.mul", "Mul", [silu, up], ("T", INNER))
        down = self.linear(f"{at}.down_proj", inner, HIDDEN)
        return self.node(f"{at}.add_mlp", "Add", [x, down], ("T", HIDDEN))

    def attention(self, layer: int, query: ir.Value, key: ir.Value, val: ir.Value) -> ir.Value:
        """One ingot::PagedAttention."""
        return self.node(
            f"layers.{layer}.attention",
            "PagedAttention",
            [query, key, val],
            ("T", HEADS * HEAD_DIM),
            domain="ingot",
            layer=layer,
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            scale=0.25,
            softcap=0.0,
            window=0,
        )

    def _rope(self, path: str, x: ir.Value, heads: int, rows: ir.Value) -> ir.Value:
        angles = np.arange(POSITIONS)[:, None] * 0.5 ** np.arange(HEAD_DIM // 2)
        cos = self.constant("rope.cos", np.cos(angles).astype(np.float32))
        sin = self.constant("rope.sin", np.sin(angles).astype(np.float32))
        axis = self.constant("zero", [0])
        wide = self.node(f"{path}.unsqueeze", "Unsqueeze", [x, axis], (1, "T", heads * HEAD_DIM))
        inputs = [wide, cos, sin, rows]
        turned = self.node(f"{path}.rope", "RotaryEmbedding", inputs, (1, "T", heads * HEAD_DIM), num_heads=heads)
        return self.node(f"{path}.squeeze", "Squeeze", [turned, axis], ("T", heads * HEAD_DIM))

    def _norm(self, path: str, x: ir.Value, rows: str) -> ir.Value:
        weight = self.constant(f"{path}.weight", self._random.uniform(0.5, 1.5, HIDDEN).astype(np.float32))
        return self.node(path, "RMSNormalization", [x, weight], (rows, HIDDEN), axis=-1, epsilon=1e-5)

    def linear(self, path: str, x: ir.Value, columns: int, bias: bool = False) -> ir.Value:
        """Gemm(x, W, b?, transB=1)."""
        assert x.shape is not None
        rows, width = x.shape
        inputs = [x, self.weight(f"{path}.weight", columns, int(str(width)))]
        if bias:
            values = self._random.standard_normal(columns).astype(np.float32)
            inputs.append(self.constant(f"{path}.bias", values))
        return self.node(path, "Gemm", inputs, (str(rows), columns), transB=1)

    def weight(self, name: str, rows: int, columns: int) -> ir.Value:
        """A weight in its stored dtype, and its Cast if it is 16-bit."""
        values = (self._random.standard_normal((rows, columns)) * columns**-0.5).astype(self._dtype)
        stored = self.constant(name, values)
        if stored.dtype == FLOAT:
            return stored
        return self.node(f"{name}.cast", "Cast", [stored], (rows, columns), to=FLOAT)

    def constant(self, name: str, values: Any) -> ir.Value:
        """The initializer of that name, made on first use."""
        if name not in self._initializers:
            tensor = ir.Tensor(np.asarray(values), name=name)
            made = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(tensor.shape.numpy()))
            made.const_value = tensor
            self._initializers[name] = made
        return self._initializers[name]

    def node(
        self,
        name: str,
        op_type: str,
        inputs: list[ir.Value],
        shape: tuple[int | str, ...],
        output: str = "",
        domain: str = "",
        **attributes: Any,
    ) -> ir.Value:
        """Append a node with one float32 output."""
        made = value(output or f"{name}.out", FLOAT, *shape)
        self._nodes.append(ir.node(op_type, inputs, attributes, domain=domain, name=name, outputs=[made]))
        return made


def value(name: str, dtype: ir.DataType, *shape: int | str) -> ir.Value:
    """A value with dtype and shape."""
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))


def array(model: ir.Model, name: str) -> NDArray[Any]:
    """The values of an initializer."""
    tensor = model.graph.initializers[name].const_value
    assert tensor is not None
    return np.asarray(tensor.numpy())
