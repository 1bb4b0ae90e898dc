"""Lowers mixtures of experts: a router's choice, then the experts' layers as matmuls grouped by expert.

    RouteExperts                                    route_rows, sort_by_expert
    DispatchExperts, the experts, CombineExperts    grouped matmul of gates and ups, grouped matmul, combine_experts

The gated activation is computed by the matmul where the form of its numbers allows it, else by a launch of its own. All
launches have as many programs as any choice of experts needs; those without rows end at once.
"""

from dataclasses import replace
from typing import Any

import onnx_ir as ir

from ingot.artifact.programs.launch_program import BufferArgument, Constant
from ingot.errors import PassError
from ingot.passes.lowering.expand_experts import routing_of
from ingot.passes.rewriting import row_columns
from ingot.passes.weights import float32_values
from ingot.pipeline.targets.cuda.expert_layers import ExpertLinear, ExpertMatmuls
from ingot.pipeline.targets.cuda.lower.activations import launch_gate
from ingot.pipeline.targets.cuda.lowering_context import ACTIVATIONS, LaunchContext, Routed, RowBuffer
from ingot.pipeline.targets.cuda.tiles import FEW_ROWS, MatmulShape, Tile, grouped_tile, packed_constants
from ingot.pipeline.targets.cuda.weight_layouts import Interleaved, Spans
from ingot.pipeline.targets.fusions import Gate
from ingot.sizes import ceil_div, next_power_of_two

STREAMED_STAGE = "streamed_stage"
_SCORES = ("softmax", "sigmoid", "sparsemixer")  # kernels/experts.py
_GROUP_BEST = (1, 2)  # scores that rank a group
_SORT_BLOCK = 1024  # pairs that a program of the sort reads at once


def lower_route(context: LaunchContext, node: ir.Node) -> None:
    """Lower the choice of experts: ids [rows, chosen], -1 for rows of padding, and weights."""
    routing, builder = routing_of(node), context.builder
    if routing.chosen_groups < routing.groups and routing.group_best not in _GROUP_BEST:
        raise PassError(
            f"node {node.name!r} ranks groups of experts by their {routing.group_best} largest scores, and the CUDA "
            "kernel by the largest or the two largest; build it for the target cpu"
        )
    logits = context.read(node.inputs[0], node, partials=True)
    bias = node.inputs[1] if len(node.inputs) > 1 else None
    pairs = context.rows * routing.chosen
    ids = builder.buffer(f"{node.name}.ids", pairs, "i32")
    weights = builder.buffer(f"{node.name}.weights", pairs, "fp32")
    context.routes[node.outputs[0]] = Routed(node.outputs[1], ids, weights, routing.chosen)
    stored = None if bias is None else builder.weight(f"{bias.name}.choice", "fp32", lambda: float32_values(bias))
    builder.launch(
        "route_rows",
        node,
        (context.rows,),
        {
            "COUNT": logits.columns,
            "BLOCK": next_power_of_two(logits.columns, 16),
            "CHOSEN": routing.chosen,
            "BLOCK_CHOSEN": next_power_of_two(routing.chosen, 2),
            "PARTS": logits.partials,
            "SCORE": _SCORES.index(routing.score),
            "GROUPS": routing.groups,
            "CHOSEN_GROUPS": routing.chosen_groups,
            "NORMALISES": routing.normalise,
            "HAS_BIAS": bias is not None,
            "GROUP_BEST": routing.group_best,
        },
        num_warps=1,
        logits=logits.buffer,
        bias=stored,
        slots=builder.external("slots"),
        ids=ids,
        weights=weights,
        logits_stride=logits.stride,
        part_stride=logits.partial_stride,
        least_sum=routing.least_sum,
        scale=routing.scale,
        margin=routing.margin,
    )


def lower_combine(context: LaunchContext, node: ir.Node) -> None:
    """Lower the experts' layers and the sum of their results, at the combination."""
    layers, ids = context.experts[node], node.inputs[0]
    assert ids is not None
    routed = context.routes[ids]
    if node.inputs[1] is not routed.weights_value or layers.dispatch.inputs[1] is not ids:
        raise PassError(
            f"{node.name!r} weighs or dispatches experts by another router than its own, and no CUDA kernel does"
        )
    GroupedLowering(context, node, layers, routed).lower()


class GroupedLowering:
    """The launches between the choice of experts and their sum."""

    def __init__(self, context: LaunchContext, node: ir.Node, layers: ExpertMatmuls, routed: Routed) -> None:
        self.context, self.node, self.layers, self.routed = context, node, layers, routed
        self.experts, self.pairs = len(layers.down.nodes), context.rows * routed.chosen
        self.hidden = row_columns(node.outputs[0])
        up, down = (self._tile(linear) for linear in (layers.up, layers.down))
        rows = max(up.rows, down.rows)  # both have the same order of pairs
        self.tiles = [one.model_copy(update={"rows": rows}) for one in (up, down)]
        self.num_tiles = (self.pairs + min(self.pairs, self.experts) * (rows - 1)) // rows

    def lower(self) -> None:
        """Add all launches; of experts of the host's, whose stage is an attribute, with copies of their weights."""
        stage = self.node.attributes.get_int(STREAMED_STAGE, -1)
        if stage < 0:
            self._lower()
            return
        name = f"{(self.node.name or '').rpartition('.')[0]}.experts"
        with self.context.builder.streamed(name, stage, self.node):
            self._lower()

    def _lower(self) -> None:
        self._sort()
        x = self.context.read(self.layers.dispatch.inputs[0], self.node)
        inner = self._gated(x)
        results = self._rows("results", self.hidden)
        self._multiply(self.layers.down, self.tiles[1], inner, results, chosen=0)
        self._combine(results)

    def _tile(self, linear: ExpertLinear) -> Tile:
        builder = self.context.builder
        shape = MatmulShape(
            kernel="matmul_nbits" if linear.is_packed else "matmul",
            rows=ceil_div(self.pairs, min(self.pairs, self.experts)),
            n=linear.n,
            columns=linear.columns,
            bits=linear.bits,
            group=linear.group,
            is_float32=builder.activation_type == "fp32",
        )
        return grouped_tile(shape, invariant=builder.shared.batch_invariant)

    def _buffer(self, name: str, count: int, type_: str | None = None) -> BufferArgument:
        return self.context.builder.buffer(f"{self.node.name}.{name}", count, type_)

    def _rows(self, name: str, columns: int) -> RowBuffer:
        """A row for each pair, in the order of experts."""
        return RowBuffer(self._buffer(name, self.pairs * columns), columns, columns)

    def _sort(self) -> None:
        order: dict[str, Any] = {name: self._buffer(name, self.pairs, "i32") for name in ("places", "pairs")}
        tiles: dict[str, Any] = {
            name: self._buffer(name, self.num_tiles, "i32") for name in ("tile_experts", "tile_starts", "tile_ends")
        }
        self._order = {"pairs": order["pairs"], **tiles}
        self._places = order["places"]
        self.context.builder.launch(
            "sort_by_expert",
            self.node,
            (self.experts,),
            {
                "COUNT": self.experts,
                "BINS": next_power_of_two(self.experts, 2),
                "BLOCK": _SORT_BLOCK,
                "TILE_ROWS": self.tiles[0].rows,
            },
            ids=self.routed.ids,
            **order,
            **tiles,
            num_pairs=self.pairs,
            num_tiles=self.num_tiles,
        )

    def _gated(self, x: RowBuffer) -> RowBuffer:
        """act(gate) * up of each pair; without gates relu(up) * up, which is relu(up)^2."""
        layers, gate = self.layers, self.layers.gate
        if not layers.has_gates:
            made, inner = (self._rows(name, layers.up.n) for name in ("up", "inner"))
            self._multiply(layers.up, self.tiles[0], x, made, chosen=self.routed.chosen)
            launch_gate(self.context, self.node, gate, made, made, inner, self.pairs)
            return inner
        half = layers.up.n // 2
        inner = self._rows("inner", half)
        if not gate.numbers and layers.up.n % Interleaved.MULTIPLE == 0:
            up = replace(layers.up, order=Interleaved(layers.gate_first))
            self._multiply(up, self.tiles[0], x, inner, chosen=self.routed.chosen, gate=gate)
            return inner
        both = self._rows("gate_up", layers.up.n)
        self._multiply(layers.up, self.tiles[0], x, both, chosen=self.routed.chosen)
        first, second = both.slice(0, half), both.slice(half, half)
        launch_gate(
            self.context,
            self.node,
            gate,
            *((first, second) if layers.gate_first else (second, first)),
            inner,
            self.pairs,
        )
        return inner

    def _multiply(
        self, linear: ExpertLinear, tile: Tile, x: RowBuffer, out: RowBuffer, *, chosen: int, gate: Gate | None = None
    ) -> None:
        builder = self.context.builder
        bias = linear.bias(builder)
        constants: dict[str, Constant] = {
            "N": linear.n,
            "COLUMNS": linear.columns,
            "TILE_ROWS": tile.rows,
            "TILE": tile.columns,
            "CHOSEN": chosen,
            "HAS_BIAS": bias is not None,
        }
        if gate is not None:
            constants["GATE"] = ACTIVATIONS[gate.activation]
        given: dict[str, Any] = {}
        if linear.is_packed:
            kernel = self._packed(linear, tile, constants, given)
        else:
            kernel, given["weight"] = "grouped_matmul", linear.plain(builder)
            constants |= {"TILE_COLUMNS": tile.depth, "UPCAST": False}
        builder.launch(
            kernel,
            self.node,
            (self.num_tiles, ceil_div(linear.n, tile.columns)),
            constants,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            x=x.buffer,
            **given,
            bias=bias,
            out=out.buffer,
            **self._order,
            x_stride=x.stride,
            out_stride=out.stride,
        )

    def _packed(self, linear: ExpertLinear, tile: Tile, constants: dict[str, Constant], given: dict[str, Any]) -> str:
        """Add the constants and operands of a weight of 4 or 8 bits, and return the kernel."""
        builder = self.context.builder
        weight: Spans = linear.spans(builder)
        shape = MatmulShape(
            kernel="matmul_nbits",
            rows=tile.rows,
            n=linear.n,
            columns=linear.columns,
            bits=weight.bits,
            group=weight.group,
        )
        kernel, own = packed_constants(shape, tile)
        constants |= {**weight.constants, **own, "GROUPS": weight.groups, "DTYPE": builder.activation_type}
        if kernel == "matmul_nbits":
            constants["SCALE_WEIGHTS"] = builder.shared.batch_invariant or tile.rows >= FEW_ROWS
        given |= {"codes": weight.codes, "scales": weight.scales, "zero_points": weight.zero_points}
        return f"grouped_{kernel}"

    def _combine(self, results: RowBuffer) -> None:
        context, out = self.context, self.context.make(self.node.outputs[0])
        grid, shape = context.blocks(self.hidden)
        context.builder.launch(
            "combine_experts",
            self.node,
            grid,
            {**shape, "CHOSEN": self.routed.chosen},
            results=results.buffer,
            ids=self.routed.ids,
            places=self._places,
            weights=self.routed.weights,
            out=out.buffer,
            results_stride=results.stride,
            out_stride=out.stride,
        )
