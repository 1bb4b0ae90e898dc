"""A small hybrid without a checkpoint of its own: the demo model's IR with recurrent layers in place of attentions.

    layer 0   short convolution, gated delta rule
    layer 1   attention
    layer 2   short convolution, selective scan

Their projections are random, so that every token's state matters. The last layer is recurrent: no attention follows it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from ingot.artifact import KVGeometry
from ingot.passes.model_facts import KV
from ingot.passes.rewriting import add_initializer
from ingot.pipeline.model import importer

VALUE_HEADS, KEY_HEADS, KEY_DIM = 4, 2, 24  # of the delta rule
SCAN_HEADS, GROUPS, STATE_DIM = 8, 2, 8
TAPS = 4


def make_hybrid(model: ir.Model) -> ir.Model:
    """Replace the attentions of layers 0 and 2 of three; the other becomes layer 0 of the KV pool."""
    attentions = [node for node in model.graph if node.op_type == "PagedAttention"]
    assert len(attentions) == 3
    for layer, make in ((0, _delta_rule), (2, _scan)):
        old = attentions[layer]
        maker = _Maker(model.graph, old, layer)
        result = make(maker, _input_of(old), int(old.outputs[0].shape[1]))  # type: ignore[index, arg-type]
        ir.convenience.replace_all_uses_with(old.outputs[0], result)
        model.graph.remove(old, safe=True)
    attentions[1].attributes["layer"] = ir.AttrInt64("layer", 0)
    kv = KV.of(model)
    assert isinstance(kv.num_kv_heads, int)
    KV.record(model, KVGeometry(num_layers=1, num_kv_heads=kv.num_kv_heads, head_dim=kv.head_dim))
    return model


@contextmanager
def imports_hybrids() -> Iterator[None]:
    """Let builds import checkpoints of three layers as hybrids."""
    import_plain = importer.import_checkpoint

    def import_hybrid(*args: Any, **options: Any) -> ir.Model:
        return make_hybrid(import_plain(*args, **options))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importer, "import_checkpoint", import_hybrid)
        yield


def _input_of(attention: ir.Node) -> ir.Value:
    """What the layer's projections read."""
    value = attention.inputs[2]
    assert value is not None
    gemm = value.producer()
    assert gemm is not None
    assert gemm.op_type == "Gemm"
    assert gemm.inputs[0] is not None
    return gemm.inputs[0]


class _Maker:
    """Puts nodes before another, with seeded weights."""

    def __init__(self, graph: ir.Graph, before: ir.Node, layer: int) -> None:
        self.graph, self.before, self.layer = graph, before, layer
        self.path = f"model.layers.{layer}.mixer"
        self.rng = np.random.default_rng(layer)

    def stored(self, name: str, array: NDArray[Any]) -> ir.Value:
        return add_initializer(self.graph, ir.tensor(array.astype(np.float32), name=f"{self.path}.{name}"))

    def random(self, name: str, *shape: int, scale: float = 1.0) -> ir.Value:
        return self.stored(name, self.rng.standard_normal(shape) * scale)

    def op(self, op_type: str, name: str, inputs: list[ir.Value], *columns: int, **attributes: Any) -> list[ir.Value]:
        """A node whose outputs are [T, columns]."""
        names = [f"{self.path}.{name}" + (f".{i}" if i else "") for i in range(len(columns))]
        outputs = [
            ir.Value(name=one, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["T", size]))
            for one, size in zip(names, columns, strict=True)
        ]
        is_own = op_type in ("ShortConvolution", "GatedDeltaRule", "SelectiveScan")
        domain = "ingot" if is_own else ""
        node = ir.node(op_type, inputs, attributes, domain=domain, outputs=outputs, name=names[0])
        node.metadata_props["ingot.pass"] = "import"
        self.graph.insert_before(self.before, node)
        return list(node.outputs)

    def gemm(self, name: str, x: ir.Value, columns: int, *bias: ir.Value) -> ir.Value:
        assert x.shape is not None
        weight = self.random(f"{name}.weight", columns, int(x.shape[1]), scale=1.5 / np.sqrt(int(x.shape[1])))  # type: ignore[arg-type]
        return self.op("Gemm", name, [x, weight, *bias], columns, transB=1)[0]

    def convolved(self, x: ir.Value, *columns: int) -> list[ir.Value]:
        """Split columns of silu(convolution(x @ W^T))."""
        size = sum(columns)
        weight, bias = self.random("conv.weight", size, TAPS, scale=0.6), self.random("conv.bias", size, scale=0.1)
        mixed = self.gemm("in_proj", x, size)
        facts = {"layer": self.layer, "activation": "silu"}
        (y,) = self.op("ShortConvolution", "conv", [mixed, weight, bias], size, **facts)
        sizes = add_initializer(self.graph, ir.tensor(np.array(columns, np.int64), name=f"{self.path}.sizes"))
        return self.op("Split", "parts", [y, sizes], *columns, axis=-1)

    def softplus(self, name: str, x: ir.Value, heads: int) -> ir.Value:
        raw = self.gemm(name, x, heads, self.random(f"{name}.bias", heads))
        return self.op("Softplus", f"{name}.softplus", [raw], heads)[0]


def _delta_rule(maker: _Maker, x: ir.Value, columns: int) -> ir.Value:
    keys, value_dim = KEY_HEADS * KEY_DIM, columns // VALUE_HEADS
    q, k, v = maker.convolved(x, keys, keys, columns)
    rate = maker.stored("rate", -np.linspace(0.02, 0.5, VALUE_HEADS))
    (decay,) = maker.op("Mul", "decay", [rate, maker.softplus("a", x, VALUE_HEADS)], VALUE_HEADS)
    (beta,) = maker.op("Sigmoid", "beta", [maker.gemm("b", x, VALUE_HEADS)], VALUE_HEADS)
    sizes = {"num_key_heads": KEY_HEADS, "num_value_heads": VALUE_HEADS, "key_dim": KEY_DIM, "value_dim": value_dim}
    facts = {"layer": maker.layer, **sizes, "scale": KEY_DIM**-0.5, "normalize": 1}
    return maker.op("GatedDeltaRule", "delta", [q, k, v, decay, beta], columns, **facts)[0]


def _scan(maker: _Maker, x: ir.Value, columns: int) -> ir.Value:
    states, head_dim = GROUPS * STATE_DIM, columns // SCAN_HEADS
    inner, b, c = maker.convolved(x, columns, states, states)
    a, d = maker.stored("a", -np.linspace(0.05, 1, SCAN_HEADS)), maker.random("d", SCAN_HEADS)
    operands = [inner, maker.softplus("dt", x, SCAN_HEADS), b, c, a, d]
    sizes = {"num_heads": SCAN_HEADS, "head_dim": head_dim, "state_dim": STATE_DIM, "num_groups": GROUPS}
    return maker.op("SelectiveScan", "scan", operands, columns, layer=maker.layer, **sizes)[0]
