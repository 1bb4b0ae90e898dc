"""Finds latent attention in the IR: the nodes that its launches compute together.

    q -> Split -> key_up of each head -> Concat -+
    kv -> Split -> norm of the latent -> Concat -+-> PagedAttention -> Split -> value_up of each head -> Concat

pipeline/model/latent_attention.py makes them. Another form is refused by the name of the attention.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from ingot.errors import PassError
from ingot.passes.rewriting import row_columns, sole_consumer
from ingot.pipeline.targets.cuda.expert_layers import ExpertLinear, require_linear
from ingot.pipeline.targets.fusions import Fusions, RmsNorm, norm

_OF = "heads"


@dataclass(frozen=True)
class LatentLayers:
    """One latent attention. A head's query is [plain | rope], `head_dim` dims in all.

    query       queries of all heads [T, heads * head_dim]
    rope        the part of the key that is rotated
    latent      the norm that makes the latent
    key_up      from the plain part of each head's query to what multiplies latents
    value_up    from a head's sum of latents to its values
    result      values of all heads
    """

    query: ir.Value
    rope: ir.Value
    latent: RmsNorm
    key_up: ExpertLinear
    value_up: ExpertLinear
    result: ir.Value

    @property
    def heads(self) -> int:
        """Heads of queries."""
        return len(self.key_up.nodes)

    @property
    def head_dim(self) -> int:
        """Dims of a head's query, before it is absorbed."""
        return row_columns(self.query) // self.heads


def find_latents(graph: ir.Graph, fusions: Fusions) -> Mapping[ir.Node, LatentLayers]:
    """Return the latent attentions by their PagedAttention, whose other nodes become absorbed ones."""
    found: dict[ir.Node, LatentLayers] = {}
    for node in graph:
        if node.op_type == "PagedAttention" and node.attributes.get_int("value_dim", 0) > 0:
            found[node], inner = _layers(node)
            fusions.absorbed |= inner
    return found


def _layers(node: ir.Node) -> tuple[LatentLayers, set[ir.Node]]:
    """The layers of an attention, and its other nodes. PassError for another structure."""
    before, of_key = _maker(node, node.inputs[0], "Concat"), _maker(node, node.inputs[1], "Concat")
    parts = before.inputs
    heads = _maker(node, parts[0], "Split")
    ups = [_maker(node, part, "Gemm") for part in parts[1::2]]
    made = norm(of_key.inputs[-1])
    latents = _reader(node, node.outputs[0], "Split")
    downs = [_reader(node, latent, "Gemm") for latent in latents.outputs]
    after = _reader(node, downs[0].outputs[0], "Concat")
    rotated = node.attributes.get_int("rotary_dim", 0)
    fits = (
        list(parts[::2]) == list(heads.outputs[1::2])
        and [up.inputs[0] for up in ups] == list(heads.outputs[::2])
        and [down.outputs[0] for down in downs] == list(after.inputs)
        and len(of_key.inputs) == 2
        and made is not None
        and rotated == row_columns(heads.outputs[1])
        and _read_within([before, of_key, heads, *ups], node)
    )
    if not fits or made is None:
        raise _refusal(node)
    for linear in (*ups, *downs):
        require_linear(linear, _OF)
    query, rope = heads.inputs[0], of_key.inputs[0]
    assert query is not None
    assert rope is not None
    path = (node.name or "").rpartition(".")[0]
    layers = LatentLayers(
        query,
        rope,
        made[0],
        ExpertLinear(f"{path}.key_up", tuple((up,) for up in ups), of=_OF),
        ExpertLinear(f"{path}.value_up", tuple((down,) for down in downs), of=_OF),
        after.outputs[0],
    )
    return layers, {before, of_key, heads, *ups, made[1], latents, *downs, after}


def _read_within(nodes: Sequence[ir.Node], attention: ir.Node) -> bool:
    """Whether only these nodes and the attention read their results."""
    readers = {reader for node in nodes for output in node.outputs for reader in output.consumers()}
    return readers <= {*nodes, attention}


def _maker(attention: ir.Node, value: ir.Value | None, op_type: str) -> ir.Node:
    node = None if value is None else value.producer()
    if node is None or node.op_type != op_type:
        raise _refusal(attention)
    return node


def _reader(attention: ir.Node, value: ir.Value, op_type: str) -> ir.Node:
    node = sole_consumer(value)
    if node is None or node.op_type != op_type:
        raise _refusal(attention)
    return node


def _refusal(attention: ir.Node) -> PassError:
    return PassError(
        f"{attention.name!r} has latent attention in another form than the CUDA kernels compute: queries and keys "
        "rotated in halves by the attention itself, a norm of the latent, and for each head a linear layer before and "
        "after it, whose inputs are not rounded to 8 bits"
    )
