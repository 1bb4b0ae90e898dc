"""The pass pack-projections: linear layers that read the same input, as one.

    Matched         q = Gemm(x, Wq, bq?, transB=1)     named <path>.q_proj
                    k = Gemm(x, Wk, bk?, transB=1)           <path>.k_proj
                    v = Gemm(x, Wv, bv?, transB=1)           <path>.v_proj
                    and likewise <path>.gate_proj and <path>.up_proj

    Replacement     packed = Gemm(x, W, b?, transB=1)        <path>.qkv_proj
                    q, k, v = Split(packed; axis=-1)         <path>.qkv_split

W holds the rows of Wq, Wk, Wv and is named ...qkv_proj.weight. It is a lazy tensor, concatenated from the checkpoint's
file each time it is read, and holds no memory in between. 16-bit weights stay 16-bit, with one Cast. Run it before
quantize-weights.

Refuses: projections with different inputs or dtypes; biases on only some; weights that have other readers or are
computed (already quantized); a missing projection. Checkpoints with packed projections (Phi-3) do not match.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from ingot.errors import PassError
from ingot.passes.base import Pass, PassKind
from ingot.passes.projections import join_projections
from ingot.passes.rewriting import (
    Refusal,
    add_constant,
    add_initializer,
    make_node,
    replace_nodes,
    require_plain_gemm,
    settle,
)
from ingot.passes.weights import apply_to_array, drop_if_unused, stored_value

PACKS = {"qkv": ("q_proj", "k_proj", "v_proj"), "gate_up": ("gate_proj", "up_proj")}


@dataclass(frozen=True)
class PackProjections(Pass):
    """Options:

    strict    projections that cannot be packed are an error, and so is a model without any
    """

    name: ClassVar[str] = "pack-projections"
    kind: ClassVar[PassKind] = "fusion"
    summary: ClassVar[str] = "Packs q, k, v and gate, up projections into one matmul each."

    strict: bool = False

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Pack every group that matches, in graph order."""
        order = {node: index for index, node in enumerate(model.graph)}
        checked = [(match, _check(match)) for match in _find(model.graph)]
        packable = [match for match, refusal in checked if refusal is None]
        for match in packable:
            _replace(model.graph, match, anchor=min(match.present, key=order.__getitem__))
        refusals = [refusal for _, refusal in checked if refusal is not None]
        is_present = any((node.name or "").endswith(tuple(f"{pack}_proj" for pack in PACKS)) for node in model.graph)
        settle(self.name, refusals, strict=self.strict, is_present=is_present)
        return ir.passes.PassResult(model, modified=bool(packable))


@dataclass(frozen=True)
class _Match:
    """Gemms of one pack below one path ("layers.0.self_attn."), in the order of PACKS; None where one is missing."""

    pack: str
    path: str
    parts: tuple[ir.Node | None, ...]

    @property
    def present(self) -> list[ir.Node]:
        return [part for part in self.parts if part is not None]


def _find(graph: ir.Graph) -> Iterator[_Match]:
    gemms = {node.name: node for node in graph if node.op_type == "Gemm"}
    for name in gemms:
        for pack, parts in PACKS.items():
            path, _, last = (name or "").rpartition(parts[0])
            if path.endswith(".") and not last:
                yield _Match(pack, path, tuple(gemms.get(path + part) for part in parts))


def _check(match: _Match) -> Refusal | None:
    first = match.present[0]
    for part, name in zip(match.parts, PACKS[match.pack], strict=True):
        if part is None:
            return Refusal(first.name or "", f"has no {name!r} to be packed with")
        reason = _why_not(part, first)
        if reason:
            return Refusal(part.name or "", reason)
    return None


def _why_not(part: ir.Node, first: ir.Node) -> str | None:
    """Return why the part cannot share one matmul with the first."""
    try:
        require_plain_gemm(part)
    except PassError as error:
        return f"cannot be packed: {error}"
    if part.inputs[0] is not first.inputs[0]:
        return f"reads another input than {first.name!r}"
    if len(part.inputs) != len(first.inputs):
        return f"and {first.name!r} differ in having a bias"
    for mine, firsts in zip(part.inputs[1:], first.inputs[1:], strict=True):
        reason = _why_not_operand(mine, firsts)
        if reason:
            return reason
    return None


def _why_not_operand(mine: ir.Value | None, firsts: ir.Value | None) -> str | None:
    """Return why this weight or bias cannot be concatenated with the first part's."""
    stored, other = stored_value(mine), stored_value(firsts)
    if stored is None or other is None:
        return "has a weight that is computed; put pack-projections before quantize-weights"
    if stored.dtype != other.dtype:
        return f"has {stored.name!r} in {stored.dtype}, unlike {other.name!r} in {other.dtype}"
    if len(stored.uses()) > 1 or (mine is not None and len(mine.uses()) > 1):
        return f"has {stored.name!r}, which other nodes read too"
    return None


def _replace(graph: ir.Graph, match: _Match, anchor: ir.Node) -> None:
    parts, path = match.present, f"{match.path}{match.pack}"
    columns = [_rows(part.inputs[1]) for part in parts]
    operands = [part.inputs[index] for index in range(1, len(parts[0].inputs)) for part in parts]
    new = []
    inputs = [parts[0].inputs[0]]
    for index in range(1, len(parts[0].inputs)):
        operand, cast = _packed_operand(graph, match, index)
        inputs.append(operand)
        new += cast
    gemm = make_node("Gemm", f"{path}_proj", inputs, [parts[0].outputs[0]], transB=1)
    join_projections(parts, gemm)
    gemm.outputs[0].name = f"{path}_proj"
    gemm.outputs[0].shape = ir.Shape([_tokens(parts[0].outputs[0]), sum(columns)])
    sizes = add_constant(graph, "integers." + ".".join(map(str, columns)), np.array(columns, np.int64))
    split = make_node("Split", f"{path}_split", [gemm.outputs[0], sizes], [part.outputs[0] for part in parts], axis=-1)
    values = {part.outputs[0]: output for part, output in zip(parts, split.outputs, strict=True)}
    replace_nodes(graph, anchor, parts, [*new, gemm, split], values)
    for old in operands:
        assert old is not None
        drop_if_unused(graph, old)


def _packed_operand(graph: ir.Graph, match: _Match, index: int) -> tuple[ir.Value, list[ir.Node]]:
    """The rows of the parts' weights (or biases) as one initializer, and its Cast if it is 16-bit."""
    operands = [part.inputs[index] for part in match.present]
    stored = [value for operand in operands if (value := stored_value(operand)) is not None]
    tensors = [value.const_value for value in stored if value.const_value is not None]
    packed = add_initializer(graph, _concatenated(_packed_name(match, stored[0].name or ""), tensors))
    if operands[0] is stored[0]:
        return packed, []
    cast = make_node("Cast", f"{packed.name}.float32", [packed], [packed], to=ir.DataType.FLOAT)
    cast.outputs[0].name = f"{packed.name}.float32"
    cast.outputs[0].dtype = ir.DataType.FLOAT
    return cast.outputs[0], [cast]


def _packed_name(match: _Match, first: str) -> str:
    """model.layers.0.self_attn.q_proj.weight -> model.layers.0.self_attn.qkv_proj.weight.

    Checkpoints have other names too (experts.0.w1.weight), and passes append to names (q_proj.bias.float32).
    """
    path, part, kind = first.rpartition(f".{PACKS[match.pack][0]}.")
    if not part:
        path, _, kind = first.rsplit(".", 2)
    return f"{path}.{match.pack}_proj.{kind}"


def _concatenated(name: str, tensors: list[ir.TensorProtocol]) -> ir.LazyTensor:
    """The tensors' rows concatenated, lazily."""
    rows = sum(int(tensor.shape.numpy()[0]) for tensor in tensors)
    shape = ir.Shape([rows, *tensors[0].shape.numpy()[1:]])
    return ir.LazyTensor(partial(_concatenate, tuple(tensors), name), tensors[0].dtype, shape, name=name)


def _concatenate(tensors: tuple[ir.TensorProtocol, ...], name: str) -> ir.TensorProtocol:
    """Copy tensor by tensor into the packed array: only that and one tensor are in memory at a time."""
    shapes = [tensor.shape.numpy() for tensor in tensors]
    packed = np.empty((sum(shape[0] for shape in shapes), *shapes[0][1:]), tensors[0].dtype.numpy())
    row = 0
    for tensor, shape in zip(tensors, shapes, strict=True):
        apply_to_array(tensor, partial(np.copyto, packed[row : row + shape[0]]))
        row += shape[0]
    return ir.Tensor(packed, dtype=tensors[0].dtype, name=name)


def _rows(operand: ir.Value | None) -> int:
    assert operand is not None
    assert operand.shape is not None
    return int(operand.shape.numpy()[0])


def _tokens(value: ir.Value) -> int | ir.SymbolicDim:
    assert value.shape is not None
    tokens = value.shape[0]
    assert isinstance(tokens, int | ir.SymbolicDim)
    return tokens
