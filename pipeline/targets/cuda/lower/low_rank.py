"""Lowers what LoRA adapters add to a linear layer: y += alpha * B (A x), after the matmul and in its result.

A program that computes adapters has the launches of the usual one, with equal bits, and two more after each matmul that
adapters can change. Only where a matmul also computes a gate or a softcap is that left to a launch of its own, which
reads the sum in float32.

Programs share the columns of x so that few rows keep a GPU busy as well. In batch-invariant programs sizes of units and
the number of partial sums are the same in all buckets.
"""

from typing import Any

import onnx_ir as ir

from ingot.artifact.programs.launch_program import AdaptedLayer, AdapterUnits
from ingot.passes.projections import projections_of
from ingot.pipeline.targets.cuda.lowering_context import LaunchContext, RowBuffer
from ingot.pipeline.targets.cuda.program_builder import Bucket
from ingot.pipeline.targets.cuda.tiles import FEW_ROWS
from ingot.pipeline.targets.cuda.weight_layouts import Interleaved, RowOrder
from ingot.sizes import ceil_div

TILE, RANKS = 128, 16
_FIELDS, _SPAN = 4, 2  # numbers of a layer in the tables of kernels/low_rank.py
_FEW_UNITS, _MANY_UNITS = 16, 64  # rows
_DEPTH, _STAGES = 128, 4
_WARPS_BY_ROW = 2  # a thread has two outputs
_COLUMNS = 512  # the least of a program; each partial sum has 4 tiles in flight
_PROGRAMS = 256  # about two for each multiprocessor of a large GPU
_MOST_PARTS, _INVARIANT_PARTS = 16, 8
_MOST_UNITS_AT_ONCE = 64


def units_of(bucket: Bucket, *, batch_invariant: bool) -> AdapterUnits:
    """Return sizes for a bucket's rows."""
    if batch_invariant:
        return AdapterUnits(rows=_FEW_UNITS, parts=_INVARIANT_PARTS)
    rows = _FEW_UNITS if bucket.rows <= FEW_ROWS else _MANY_UNITS
    parts = ceil_div(_PROGRAMS, ceil_div(bucket.rows, rows))
    return AdapterUnits(rows=rows, parts=min(parts, _MOST_PARTS))


def is_adapted(context: LaunchContext, node: ir.Node) -> bool:
    """Report whether the program computes adapters that may change the layer."""
    return context.builder.adapter_units is not None and bool(projections_of(node))


def lower_low_rank(
    context: LaunchContext, node: ir.Node, x: RowBuffer, out: RowBuffer, order: RowOrder, alpha: float
) -> None:
    """Add the launches for rows x of a layer's input and its result, which is whole or has partials."""
    builder, units = context.builder, context.builder.adapter_units
    assert units is not None
    place, first_tile = _place(
        context, node, AdaptedLayer(node=node.name or "", outputs=out.columns, columns=x.columns)
    )
    is_head = builder.head_start is not None
    most = units.most(builder.rows, builder.bucket.sequences)
    parts = max(1, min(units.parts, x.columns // _COLUMNS))
    given: dict[str, Any] = {
        "pool": builder.buffer("adapter_pool", 0),
        "table": builder.external("adapter_table", place * _FIELDS),
        "results": builder.external("adapter_results"),
        "units": builder.external("head_adapter_units" if is_head else "adapter_units"),
        "rows": builder.external("head_adapter_rows" if is_head else "adapter_rows"),
    }
    shape = {"SPLITS": parts, "TILE_ROWS": units.rows, "TILE_RANKS": RANKS}
    builder.launch(
        "low_rank_shrink",
        node,
        (min(most, ceil_div(_PROGRAMS, parts)), parts),
        {**shape, "TILE_COLUMNS": _DEPTH, "UPCAST": False},
        num_stages=_STAGES,
        **given,
        x=x.buffer,
        columns=x.columns,
        x_stride=x.stride,
    )
    adds_partials = builder.shared.batch_invariant and out.partials > 1
    kind = 0 if not isinstance(order, Interleaved) else 1 if order.gate_first else 2
    builder.launch(
        "low_rank_expand",
        node,
        (min(most, _FEW_UNITS if units.rows == _FEW_UNITS else _MOST_UNITS_AT_ONCE), ceil_div(out.columns, TILE)),
        {
            **shape,
            "TILE": TILE,
            "PARTS": out.partials if adds_partials else 1,
            "ORDER": kind,
            "BY_ROW": units.rows == _FEW_UNITS,
        },
        num_warps=_WARPS_BY_ROW if units.rows == _FEW_UNITS else 4,
        **given,
        spans=builder.external("adapter_spans", first_tile * _SPAN),
        out=out.buffer,
        outputs=out.columns,
        out_stride=out.stride,
        part_stride=out.partial_stride if adds_partials else 0,
        alpha=alpha,
    )


def _place(context: LaunchContext, node: ir.Node, layer: AdaptedLayer) -> tuple[int, int]:
    """Return the layer's place among those that adapters change, and the number of tiles before it."""
    adapted = context.builder.shared.adapted
    assert adapted.setdefault(layer.node, layer) == layer, f"two layers have the name {layer.node!r}"
    place = list(adapted).index(layer.node)
    return place, sum(ceil_div(one.outputs, TILE) for one in list(adapted.values())[:place])
