"""Rotary embeddings that pair halves instead of neighbours, by another order of the rows that make queries and keys.

    Matched         q = Gemm(x, W, b?)        rows 0 to H * D of W, or of one part of a Split of the Gemm
                    q = Concat(p, ..., p, ..) each p, a part of a Split of one Gemm, the rotated columns of a head
                    q' = Squeeze(RotaryEmbedding(Unsqueeze(q, 0), cos, sin, positions; interleaved=1), 0)

    Replacement     the same with interleaved=0, and rows (2i, 2i + 1) of each head at i and i + rotary_dim / 2

Attention multiplies queries by keys, so an order that both share changes nothing; values keep theirs. Kernels pair
halves, so that without this pass the rotary embedding would stay an op of its own, or have no kernel at all. Weights
keep their type: codes, scales and zero points are reordered by row. An artifact of such a model holds the new order.

Refuses: queries and keys that something other than one linear layer makes (a norm in between), that others read too, or
whose weights others read too. If one rotary embedding of an attention is refused, both stay.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.passes.base import Pass, PassKind
from ingot.passes.projections import forget_projections
from ingot.passes.rewriting import Refusal, attentions, required_input, row_columns, settle, small_constant
from ingot.passes.weights import apply_to_array, is_stored

Order = NDArray[np.intp]


@dataclass(frozen=True)
class DeinterleaveRotary(Pass):
    """No options. A rotary embedding that does not match stays as it is."""

    name: ClassVar[str] = "deinterleave-rotary"
    kind: ClassVar[PassKind] = "lowering"
    summary: ClassVar[str] = "Lets rotary embeddings pair halves, by another order of the rows of queries and keys."

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Reorder the queries and keys of every attention whose rotations can both be changed."""
        refusals, modified = [], False
        for attention in attentions(model.graph):
            rotations = [node for node in map(_rotation_of, attention.inputs[:2]) if node is not None]
            places = [_place(rotation) for rotation in rotations]
            refused = [place for place in places if isinstance(place, Refusal)]
            refusals += refused
            if not refused and len(rotations) == 2:
                for place in places:
                    assert isinstance(place, _Place)
                    _reorder(place)
                modified = True
        settle(self.name, refusals, strict=False, is_present=True)
        return ir.passes.PassResult(model, modified)


@dataclass(frozen=True)
class _Place:
    """A rotation, the linear layer that makes its input, and the new order of all rows of the layer."""

    rotation: ir.Node
    gemm: ir.Node
    order: Order


def _rotation_of(operand: ir.Value | None) -> ir.Node | None:
    """The RotaryEmbedding of neighbours that makes an operand of attention, through the Squeeze of its batch axis."""
    squeeze = None if operand is None else operand.producer()
    source = squeeze.inputs[0] if squeeze is not None and squeeze.op_type == "Squeeze" else None
    node = None if source is None else source.producer()
    if node is None or node.op_type != "RotaryEmbedding" or not node.attributes.get_int("interleaved", 0):
        return None
    return node


def _place(rotation: ir.Node) -> _Place | Refusal:
    name = rotation.name or ""
    unsqueeze = required_input(rotation).producer()
    value = unsqueeze.inputs[0] if unsqueeze is not None and unsqueeze.op_type == "Unsqueeze" else None
    if value is None or len(value.uses()) != 1:
        return Refusal(name, "rotates a value that others read too")
    parts = _parts_of_heads(rotation, value)
    if isinstance(parts, Refusal):
        return parts
    made = [_maker(rotation, part) for part in parts]
    refused = next((maker for maker in made if isinstance(maker, Refusal)), None)
    if refused is not None:
        return refused
    makers = [maker for maker in made if not isinstance(maker, Refusal)]
    gemm = makers[0][0]
    if any(other is not gemm for other, _ in makers):
        return Refusal(name, "rotates results of several linear layers")
    if not all(_is_own(operand) for operand in gemm.inputs[1:]):
        return Refusal(gemm.name or "", "has weights that others read too")
    order = np.arange(row_columns(gemm.outputs[0]))
    for (_, start), part in zip(makers, parts, strict=True):
        columns = row_columns(part)
        order[start : start + columns] = start + _halves(rotation, columns, len(parts))
    return _Place(rotation, gemm, order)


def _parts_of_heads(rotation: ir.Node, value: ir.Value) -> list[ir.Value] | Refusal:
    """The value itself, or where it is a Concat, the part of each head that is rotated."""
    concat = value.producer()
    if concat is None or concat.op_type != "Concat":
        return [value]
    heads = rotation.attributes["num_heads"].as_int()
    dim = row_columns(value) // heads
    starts, at = dict[int, ir.Value](), 0
    for part in concat.inputs:
        assert part is not None
        starts[at] = part
        at += row_columns(part)
    parts = [starts.get(head * dim) for head in range(heads)]
    rotated = rotation.attributes.get_int("rotary_embedding_dim", 0) or dim
    found = [part for part in parts if part is not None and row_columns(part) == rotated and len(part.uses()) == 1]
    return found if len(found) == heads else Refusal(concat.name or "", "joins heads whose rotated dims are not a part")


def _maker(rotation: ir.Node, value: ir.Value) -> tuple[ir.Node, int] | Refusal:
    """The linear layer that makes a value, and the value's first row of it."""
    producer, start = value.producer(), 0
    if producer is not None and producer.op_type == "Split":
        sizes = small_constant(producer.inputs[1], max_elements=len(producer.outputs))
        if sizes is None:
            return Refusal(producer.name or "", "splits into computed sizes")
        start = sum(sizes[: producer.outputs.index(value)])
        producer = _before(required_input(producer))
    if producer is not None and producer.op_type == "Mul" and row_columns(required_input(producer, 1)) == 1:
        producer = _before(required_input(producer))  # a factor of each token, whatever the order of its columns
    if producer is None or producer.op_type != "Gemm":
        return Refusal(
            rotation.name or "",
            "rotates neighbours that no linear layer makes, so that kernels, which pair halves, cannot",
        )
    return producer, start


def _before(value: ir.Value) -> ir.Node | None:
    """The node that makes a value with one reader."""
    return value.producer() if len(value.uses()) == 1 else None


def _is_own(operand: ir.Value | None) -> bool:
    """Whether a stored operand, and each initializer that it is made of, has one reader."""
    return operand is None or (is_stored(operand) and all(len(value.uses()) == 1 for value in _parts(operand)))


def _parts(operand: ir.Value) -> Iterator[ir.Value]:
    """The operand, and the initializers that its Cast or DequantizeLinear reads."""
    yield operand
    producer = operand.producer()
    if producer is not None:
        yield from (value for value in producer.inputs if value is not None)


def _halves(rotation: ir.Node, columns: int, num_parts: int) -> Order:
    """Return the source of each column of a part, so that rotated neighbours of each head become two halves."""
    heads = rotation.attributes["num_heads"].as_int() // num_parts
    dim = columns // heads
    rotated = rotation.attributes.get_int("rotary_embedding_dim", 0) or dim
    head = np.concatenate([np.arange(0, rotated, 2), np.arange(1, rotated, 2), np.arange(rotated, dim)])
    order: Order = (np.arange(heads)[:, None] * dim + head).reshape(-1)
    return order


def _reorder(place: _Place) -> None:
    forget_projections([place.gemm])  # an adapter's rows are in the old order
    for operand in place.gemm.inputs[1:]:
        for stored in () if operand is None else _parts(operand):
            if stored.is_initializer():
                _reorder_rows(stored, place.order)
    place.rotation.attributes["interleaved"] = ir.AttrInt64("interleaved", 0)


def _reorder_rows(stored: ir.Value, order: Order) -> None:
    """Reorder a tensor's rows lazily, in its own type; what all rows share stays."""
    tensor = stored.const_value
    assert tensor is not None
    shape = tensor.shape.numpy()
    if not shape or shape[0] != len(order):
        return
    make = partial(_taken, tensor, order)
    stored.const_value = ir.LazyTensor(make, tensor.dtype, ir.Shape(shape), name=stored.name)


def _taken(tensor: ir.TensorProtocol, order: Order) -> ir.TensorProtocol:
    values: NDArray[Any] = apply_to_array(tensor, lambda array: np.array(array[order]))
    return ir.Tensor(values, dtype=tensor.dtype, name=tensor.name)
