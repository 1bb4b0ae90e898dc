"""A third-party pass for tests: a trained model's RMS norms become layer norms with biases."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from ingot.passes.base import Pass, PassKind
from ingot.passes.rewriting import add_initializer, make_node, replace_nodes

ENTRY_POINT = ("layer-norms", f"{__name__}:LayerNorms")
_SPREAD = 0.2  # of the biases


@dataclass(frozen=True)
class LayerNorms(Pass):
    """RMSNormalization(x, w)  ->  LayerNormalization(x, w, bias), with random biases that are the same each time."""

    name: ClassVar[str] = "layer-norms"
    kind: ClassVar[PassKind] = "fusion"
    summary: ClassVar[str] = "Turns RMS norms into layer norms with biases."

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        rng, graph = np.random.default_rng(0), model.graph
        found = [node for node in graph if node.op_type == "RMSNormalization"]
        for node in found:
            weight = node.inputs[1]
            assert weight is not None
            assert weight.shape is not None
            values = rng.normal(0, _SPREAD, weight.shape.numpy()).astype(np.float32)
            bias = add_initializer(graph, ir.Tensor(values, name=f"{node.name}.bias"))
            epsilon = node.attributes["epsilon"].as_float()
            made = make_node(
                "LayerNormalization",
                node.name or "",
                [*node.inputs, bias],
                node.outputs,
                axis=-1,
                epsilon=epsilon,
            )
            replace_nodes(graph, node, [node], [made], {node.outputs[0]: made.outputs[0]})
        return ir.passes.PassResult(model, modified=bool(found))
