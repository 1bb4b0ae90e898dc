"""Finds the linear layers of a mixture's experts in the IR, and stacks their weights for grouped matmuls.

    x_e = DispatchExperts(x, ids) -> gate_e, up_e -> act(gate_e) * up_e -> down_e -> CombineExperts

gate_e and up_e are two Gemms, or one whose result is split in halves. Experts without a gate have relu(up_e)^2.
All experts of a layer have one form: bits, block size, zero points, biases. An expert of another form is refused by the
name of its node.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.artifact.programs.launch_program import BufferArgument, WeightArgument
from ingot.errors import PassError
from ingot.passes.lowering.expand_experts import COMBINE, DISPATCH
from ingot.passes.weights import float32_values, is_stored
from ingot.pipeline.targets.cuda import weight_layouts
from ingot.pipeline.targets.cuda.program_builder import ProgramBuilder
from ingot.pipeline.targets.cuda.weight_layouts import IN_ORDER, RowOrder, Spans
from ingot.pipeline.targets.fusions import Fusions, Gate, GatedMatmul, squares


@dataclass(frozen=True)
class ExpertLinear:
    """A linear layer of every expert: rows of its `nodes` (Gemm) one after another, in one order.

    name    of the stacked weights
    nodes   [experts][1 or 2]
    of      what has the layers, in words: experts, or the heads of latent attention
    """

    name: str
    nodes: tuple[tuple[ir.Node, ...], ...]
    order: RowOrder = IN_ORDER
    of: str = "experts"

    @property
    def n(self) -> int:
        """Rows of an expert's weight."""
        return sum(_shape(node)[0] for node in self.nodes[0])

    @property
    def columns(self) -> int:
        """Columns of an expert's weight."""
        return _shape(self.nodes[0][0])[1]

    @property
    def is_packed(self) -> bool:
        """Whether the weights have 4 or 8 bits. PassError for experts of different forms."""
        forms: dict[object, ir.Node] = {}
        for node in (node for nodes in self.nodes for node in nodes):
            forms.setdefault(_form(node), node)
        if len(forms) > 1:
            names = [node.name for node in forms.values()]
            raise PassError(
                f"{names[0]!r} and {names[1]!r} have weights of different forms, and the CUDA kernels multiply all "
                f"{self.of} of a layer in one: give them the same bits, block size and zero points"
            )
        return next(iter(forms)) != "floats"

    @property
    def bits(self) -> int:
        """Bits of a stored weight; 16 for floats."""
        if not self.is_packed:
            return 16
        codes = _quantizer(self.nodes[0][0]).inputs[0]
        assert codes is not None
        assert codes.dtype is not None
        return 4 if codes.dtype.bitwidth <= 4 else 8

    @property
    def group(self) -> int:
        """Columns that share a scale; 0 for a row, or for floats."""
        return _quantizer(self.nodes[0][0]).attributes.get_int("block_size", 0) or 0 if self.is_packed else 0

    def plain(self, builder: ProgramBuilder) -> WeightArgument | BufferArgument:
        """Return the weights [experts, n, columns] in the activations' type."""
        read = partial(self._stacked, lambda node: float32_values(node.inputs[1]))
        name, elements = self.order.name(f"{self.name}.weight"), len(self.nodes) * self.n * self.columns
        return builder.layer_weight(name, builder.activation_type, read, elements)

    def spans(self, builder: ProgramBuilder) -> Spans:
        """Return codes [experts, n, spans * 64], scales and zero points [experts, groups, n]."""
        makers = [[_quantizer(node) for node in nodes] for nodes in self.nodes]
        return weight_layouts.stacked_spans(builder, self.name, makers, self.order)

    def bias(self, builder: ProgramBuilder) -> WeightArgument | BufferArgument | None:
        """Return the biases [experts, n] in the activations' type."""
        have = [len(node.inputs) > 2 and node.inputs[2] is not None for nodes in self.nodes for node in nodes]
        if not any(have):
            return None
        if not all(have):
            raise PassError(
                f"{self.name!r} has a bias in some {self.of} alone, and the CUDA kernels add one in all or none"
            )
        read = partial(self._stacked, lambda node: float32_values(node.inputs[2]))
        name = self.order.name(f"{self.name}.bias")
        return builder.layer_weight(name, builder.activation_type, read, len(self.nodes) * self.n)

    def _stacked(self, read: Any) -> NDArray[np.float32]:
        return np.stack([self.order(np.concatenate([read(node) for node in nodes])) for nodes in self.nodes])


@dataclass(frozen=True)
class ExpertMatmuls:
    """A mixture between its dispatch and its combination: down(act(gate(x)) * up(x)) of each expert.

    up      gates and ups: the gates' rows first, or the ups'; ups alone without gates
    gate    of the first expert, with the activation of all; of a squared Relu, relu(up) * up
    """

    dispatch: ir.Node
    up: ExpertLinear
    down: ExpertLinear
    gate: Gate
    gate_first: bool

    @property
    def has_gates(self) -> bool:
        """Whether gate and up are two results."""
        return self.gate.gate is not self.gate.up


def find_experts(graph: ir.Graph, fusions: Fusions) -> Mapping[ir.Node, ExpertMatmuls]:
    """Return the mixtures by their CombineExperts, whose other nodes become absorbed ones."""
    gates = {node: fusion for node, fusion in fusions.at.items() if isinstance(fusion, Gate)}
    gates |= {fusion.last: fusion.gate for fusion in fusions.at.values() if isinstance(fusion, GatedMatmul)}
    found: dict[ir.Node, ExpertMatmuls] = {}
    for node in graph:
        if node.op_type == COMBINE:
            found[node], inner = _layers(node, gates)
            fusions.absorbed |= inner
    return found


def _layers(combine: ir.Node, gates: Mapping[ir.Node, Gate]) -> tuple[ExpertMatmuls, set[ir.Node]]:
    """The layers of a mixture, and its nodes before the combination. PassError for another structure."""
    experts = [_Expert.of(combine, result, gates) for result in combine.inputs[2:]]
    dispatch = _producer(experts[0].source)
    if dispatch is None or dispatch.op_type != DISPATCH or [one.source for one in experts] != list(dispatch.outputs):
        raise PassError(
            f"{combine.name!r} adds experts that do not read their own rows of one dispatch, and no CUDA kernel does"
        )
    first = experts[0]
    for one in experts:
        if one.form != first.form:
            raise PassError(
                f"{one.down.name!r} is of an expert with another activation than the first, and no CUDA kernel has both"
            )
    path = (combine.name or "").rpartition(".")[0]
    up = ExpertLinear(f"{path}.experts.gate_up", tuple(one.up for one in experts))
    down = ExpertLinear(f"{path}.experts.down", tuple((one.down,) for one in experts))
    nodes = {node for one in experts for node in _between(one.down, dispatch)}
    return ExpertMatmuls(dispatch, up, down, first.gate, first.gate_first), {*nodes, dispatch}


@dataclass(frozen=True)
class _Expert:
    """One expert: the nodes of its layers, and the rows that it reads."""

    source: ir.Value
    up: tuple[ir.Node, ...]
    down: ir.Node
    gate: Gate
    gate_first: bool

    @property
    def form(self) -> tuple[object, ...]:
        """Facts that must be equal for all experts of a layer."""
        return self.gate.activation, self.gate.numbers, self.gate_first, self.gate.gate is self.gate.up

    @classmethod
    def of(cls, combine: ir.Node, result: ir.Value | None, gates: Mapping[ir.Node, Gate]) -> "_Expert":
        down = _producer(result)
        last = None if down is None else _producer(down.inputs[0])
        gate = None if last is None else gates.get(last) or _squared(last)
        if down is None or gate is None:
            raise PassError(
                f"{combine.name!r} adds experts other than down(act(gate) * up) and down(relu(up)^2), or with "
                "activations rounded to 8 bits; the CUDA kernels compute such alone"
            )
        up, gate_first = _gate_and_up(gate)
        for node in (*up, down):
            require_linear(node)
        source = up[0].inputs[0]
        assert source is not None
        return cls(source, up, down, gate, gate_first)


def _squared(node: ir.Node) -> Gate | None:
    """A squared Relu as the gate of its own input."""
    curve = next((curve for curve, _ in squares(node)), None)
    return None if curve is None else Gate(curve.source, curve.source, "relu")


def _gate_and_up(gate: Gate) -> tuple[tuple[ir.Node, ...], bool]:
    """The Gemms of the gate and its factor, in the order of their rows, and whether the gate is first."""
    made = [_producer(one) for one in (gate.gate, gate.up)]
    assert made[0] is not None
    assert made[1] is not None
    if gate.gate is gate.up:
        return (made[0],), True
    if made[0] is made[1] and made[0].op_type == "Split":
        gemm = _producer(made[0].inputs[0])
        assert gemm is not None
        return (gemm,), gate.gate is made[0].outputs[0]
    if made[0].inputs[0] is not made[1].inputs[0]:
        raise PassError(
            f"{made[0].name!r} and {made[1].name!r} read different rows, and are gate and factor of one expert"
        )
    return (made[0], made[1]), True


def require_linear(node: ir.Node, of: str = "experts") -> None:
    """Raise PassError for a node that is not x @ W^T + b with a stored weight of floats, 4 or 8 bits."""
    flags = [node.attributes.get_int(name, 0) for name in ("transA", "transB")]
    factors = [node.attributes.get_float(name, 1.0) for name in ("alpha", "beta")]
    weight = node.inputs[1] if len(node.inputs) > 1 else None
    if node.op_type != "Gemm" or flags != [0, 1] or factors != [1.0, 1.0] or weight is None or not is_stored(weight):
        raise PassError(
            f"{node.name!r} ({node.op_type}) is not x @ W^T + b with a stored weight, and CUDA kernels of {of} are"
        )
    dequantize = weight_layouts.quantizer(weight)
    if dequantize is not None and weight_layouts.is_float8(dequantize):
        raise PassError(
            f"{node.name!r} has a float8 weight, and there is no CUDA kernel of {of} for it: exclude them from "
            "quantization, or give them 4 or 8 bits in whole numbers"
        )


def _between(down: ir.Node, dispatch: ir.Node) -> set[ir.Node]:
    """The nodes of an expert."""
    nodes, waiting = {down}, [down]
    while waiting:
        for value in waiting.pop().inputs:
            if value is None or is_stored(value):
                continue
            made = value.producer()
            if made is not None and made is not dispatch and made not in nodes:
                nodes.add(made)
                waiting.append(made)
    return nodes


def _form(node: ir.Node) -> tuple[object, ...] | str:
    dequantize = weight_layouts.quantizer(node.inputs[1])
    if dequantize is None:
        return "floats"
    codes = dequantize.inputs[0]
    assert codes is not None
    has_zeros = len(dequantize.inputs) > 2 and dequantize.inputs[2] is not None
    return codes.dtype, dequantize.attributes.get_int("block_size", 0), has_zeros


def _quantizer(node: ir.Node) -> ir.Node:
    dequantize = weight_layouts.quantizer(node.inputs[1])
    assert dequantize is not None
    return dequantize


def _shape(node: ir.Node) -> Sequence[int]:
    weight = node.inputs[1]
    assert weight is not None
    assert weight.shape is not None
    return [int(size) for size in weight.shape.numpy()]


def _producer(value: ir.Value | None) -> ir.Node | None:
    return None if value is None else value.producer()
