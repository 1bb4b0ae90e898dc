"""Lowers recurrent ops: each reads and replaces its part of the sequences' states, in the runtime's pool.

    ShortConvolution                 short_convolution
    GatedDeltaRule, SelectiveScan    recurrence_rates of each operand that it finds (recurrence_rates.py), then
                                     recurrence; in buckets of prompts also recurrence_chunks and chunked_recurrence,
                                     for sequences of more than FEW_TOKENS tokens of the step

Batch-invariant programs compute all sequences token by token: chunks of tokens round otherwise.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.artifact.programs.launch_program import BufferArgument, Constant, WeightArgument
from ingot.artifact.programs.recurrent import ConvolutionFacts, DeltaRuleFacts, RecurrentFacts, ScanFacts, kind_of
from ingot.errors import PassError
from ingot.passes.weights import float32_values
from ingot.pipeline.targets.cuda.lowering_context import LaunchContext, RowBuffer
from ingot.pipeline.targets.cuda.program_builder import TILE_QUERIES
from ingot.pipeline.targets.cuda.recurrence_rates import CURVES, Rate
from ingot.pipeline.targets.recurrent_layers import recurrent_facts, require_stored_operands
from ingot.sizes import ceil_div, next_power_of_two

FEW_TOKENS = 16  # a chunk would be mostly padding if a sequence has no more tokens in a step
CHUNK = 32  # positions; 64 take more instructions for a token, and spill registers (docs/log.md)
MOST_KEYS = 256  # rows of a state that a program keeps in registers
CONVOLUTION_BLOCKS = {"decode": 256, "ragged": 64}  # channels of a program
CHUNKED_TILE, CHUNKED_WARPS, CHUNKED_STAGES = 32, 4, 2
CHUNKS_WARPS = 4
_STATE_ELEMENTS = 2048  # elements of a state that a warp keeps in registers
_FLOAT_BYTES = 4


def lower_convolution(context: LaunchContext, node: ir.Node) -> None:
    """Lower ShortConvolution."""
    facts = _facts(node)
    assert isinstance(facts, ConvolutionFacts)
    builder, ragged = context.builder, context.builder.bucket.attention == "ragged"
    if facts.taps - 1 > TILE_QUERIES:
        raise PassError(f"{node.name!r} (ShortConvolution) has {facts.taps} taps; CUDA kernels take {TILE_QUERIES + 1}")
    x, out = context.read(node.inputs[0], node, partials=True), context.make(node.outputs[0])
    block = min(CONVOLUTION_BLOCKS[builder.bucket.attention], next_power_of_two(facts.channels, 16))
    tiles = builder.bucket.tiles if ragged else context.rows
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    builder.launch(
        "short_convolution",
        node,
        (tiles, ceil_div(facts.channels, block)),
        {
            "CHANNELS": facts.channels,
            "BLOCK": block,
            "TAPS": facts.taps,
            "BLOCK_TAPS": next_power_of_two(facts.taps - 1),
            "TILE": TILE_QUERIES if ragged else 1,
            "PARTS": x.partials,
            "HAS_BIAS": bias is not None,
            "HAS_SILU": facts.activation == "silu",
            "RAGGED": ragged,
        },
        x=x.buffer,
        weight=_floats(context, node.inputs[1], "taps", np.transpose),
        bias=None if bias is None else _floats(context, bias, "bias"),
        out=out.buffer,
        **_sequences(context, facts),
        tile_sequences=builder.external("tile_sequences") if ragged else None,
        tile_starts=builder.external("tile_starts") if ragged else None,
        x_stride=x.stride,
        part_stride=x.partial_stride,
        out_stride=out.stride,
    )


def lower_delta_rule(context: LaunchContext, node: ir.Node) -> None:
    """Lower GatedDeltaRule."""
    facts = _facts(node)
    assert isinstance(facts, DeltaRuleFacts)
    q, k, v = (context.read(value, node) for value in node.inputs[:3])
    rates: dict[str, Any] = {
        "decay": _lower_rate(context, node, 3),
        "gate": _lower_rate(context, node, 4),
        "rate": None,
        "skip": None,
    }
    constants: dict[str, Constant] = {
        "HEADS": facts.num_value_heads,
        "KEY_HEADS": facts.num_key_heads,
        "KEYS": facts.key_dim,
        "IS_SCAN": False,
    }
    _Recurrence(context, node, facts, (q, k, v), rates, constants, facts.value_dim, facts.scale).lower(facts.normalize)


def lower_scan(context: LaunchContext, node: ir.Node) -> None:
    """Lower SelectiveScan."""
    facts = _facts(node)
    assert isinstance(facts, ScanFacts)
    v, k, q = (context.read(node.inputs[index], node) for index in (0, 2, 3))
    rates: dict[str, Any] = {
        "decay": None,
        "gate": _lower_rate(context, node, 1),
        "rate": _floats(context, node.inputs[4], "rate"),
        "skip": _floats(context, node.inputs[5], "skip"),
    }
    constants: dict[str, Constant] = {
        "HEADS": facts.num_heads,
        "KEY_HEADS": facts.num_groups,
        "KEYS": facts.state_dim,
        "IS_SCAN": True,
    }
    _Recurrence(context, node, facts, (q, k, v), rates, constants, facts.head_dim, 1.0).lower(normalizes=False)


@dataclass(frozen=True)
class _Recurrence:
    """The launches of a delta rule or scan, whose rates are computed.

    rows     q, k and v
    rates    decay, gate, rate and skip, of kernels/recurrence.py
    values   columns of a head's state
    """

    context: LaunchContext
    node: ir.Node
    facts: RecurrentFacts
    rows: tuple[RowBuffer, RowBuffer, RowBuffer]
    rates: dict[str, Any]
    constants: dict[str, Constant]
    values: int
    scale: float

    def lower(self, normalizes: bool) -> None:
        """Launch the recurrence, and where a step may hold prompts, the kernels of chunks."""
        keys, builder = int(self.constants["KEYS"]), self.context.builder
        if keys > MOST_KEYS:
            raise PassError(
                f"{self.node.name!r} ({self.node.op_type}) has states of {keys} rows; CUDA kernels take {MOST_KEYS}"
            )
        block = next_power_of_two(keys, 16)
        shape: dict[str, Constant] = {**self.constants, "BLOCK_KEYS": block, "VALUES": self.values}
        heads, ragged = int(shape["HEADS"]), builder.bucket.attention == "ragged"
        has_chunks = ragged and not builder.shared.batch_invariant and builder.bucket.rows > FEW_TOKENS
        out = self.context.make(self.node.outputs[0])
        strides = {f"{name}_stride": rows.stride for name, rows in zip("qkv", self.rows, strict=True)}
        given: dict[str, Any] = {
            **{name: rows.buffer for name, rows in zip("qkv", self.rows, strict=True)},
            **self.rates,
            "out": out.buffer,
            **_sequences(self.context, self.facts),
            **strides,
            "out_stride": out.stride,
            "scale": self.scale,
        }
        if not ragged:
            given["query_starts"] = None
        tile = state_columns(block)
        builder.launch(
            "recurrence",
            self.node,
            (builder.bucket.sequences, heads, ceil_div(self.values, tile)),
            {**shape, "TILE": tile, "NORMALIZES": normalizes, "RAGGED": ragged, "MOST": FEW_TOKENS * has_chunks},
            num_warps=1,
            **given,
        )
        if has_chunks:
            self._lower_chunks(shape, normalizes, given)

    def _lower_chunks(self, shape: dict[str, Constant], normalizes: bool, given: dict[str, Any]) -> None:
        builder, rows, heads = self.context.builder, self.context.rows, int(shape["HEADS"])
        chunked: dict[str, Constant] = {
            "CHUNK": CHUNK,
            "LEAST": FEW_TOKENS + 1,
            "EXACT": builder.activation_type == "fp32",
        }
        name, sequences = self.node.name, builder.bucket.sequences
        widths = {"inverses": 1 if shape["IS_SCAN"] else CHUNK, "weights": CHUNK, "factors": 2}
        made: dict[str, Any] = {
            part: builder.buffer(f"{name}.{part}", rows * heads * width, "fp32") for part, width in widths.items()
        }
        ours = ("q", "k", "decay", "gate", "rate", "lengths", "query_starts", "q_stride", "k_stride", "scale")
        of_keys = {key: value for key, value in shape.items() if key != "VALUES"}
        sizes: dict[str, Constant] = {"SEQUENCES": sequences, "BLOCK_SEQUENCES": next_power_of_two(sequences)}
        builder.launch(
            "recurrence_chunks",
            self.node,
            (rows // CHUNK + 2 * sequences, heads),
            {**of_keys, **sizes, **chunked, "NORMALIZES": normalizes},
            num_warps=CHUNKS_WARPS,
            **{key: given[key] for key in ours},
            **made,
        )
        builder.launch(
            "chunked_recurrence",
            self.node,
            (sequences, heads, ceil_div(self.values, CHUNKED_TILE)),
            {**shape, **chunked, "TILE": CHUNKED_TILE},
            num_warps=CHUNKED_WARPS,
            num_stages=CHUNKED_STAGES,
            **given,
            **made,
        )


def state_columns(block_keys: int) -> int:
    """Columns of a state that a warp keeps in registers."""
    return min(16, max(1, _STATE_ELEMENTS // block_keys))


def _facts(node: ir.Node) -> RecurrentFacts:
    require_stored_operands(node)
    return recurrent_facts(node)


def _sequences(context: LaunchContext, facts: RecurrentFacts) -> dict[str, Any]:
    """Pointers to the layer's states and to what says which sequence has which tokens and slot."""
    builder = context.builder
    part = next(part for part in builder.kv.state if (part.layer, part.kind) == (facts.layer, kind_of(facts)))
    ragged = builder.bucket.attention == "ragged"
    return {
        "states": builder.external("state_pool", part.offset // _FLOAT_BYTES),
        "state_slots": builder.external("state_slots"),
        "lengths": builder.external("lengths"),
        "query_starts": builder.external("query_starts") if ragged else None,
        "slot_stride": builder.kv.state_bytes // _FLOAT_BYTES,
    }


def _lower_rate(context: LaunchContext, node: ir.Node, index: int) -> BufferArgument:
    """Launch the rate of an operand, [rows, heads] in 32-bit floats."""
    value, builder = node.inputs[index], context.builder
    assert value is not None
    rate: Rate = context.rates[value]
    x = context.read(rate.source, node, partials=True, unaligned=True)
    source, offset = x.unaligned
    out = builder.buffer(f"{value.name}.rates", context.rows * x.columns, "fp32")
    builder.launch(
        "recurrence_rates",
        node,
        (context.rows,),
        {
            "COLUMNS": x.columns,
            "BLOCK": next_power_of_two(x.columns, 16),
            "PARTS": x.partials,
            "CURVE": CURVES.index(rate.curve),
            "HAS_BIAS": rate.bias is not None,
            "HAS_FACTORS": rate.factors is not None,
        },
        num_warps=1,
        x=source,
        bias=None if rate.bias is None else _floats(context, rate.bias, "rates"),
        factors=None if rate.factors is None else _floats(context, rate.factors, "rates"),
        out=out,
        x_offset=offset,
        x_stride=x.stride,
        part_stride=x.partial_stride,
        least=rate.least,
        most=rate.most,
        alpha=rate.alpha,
    )
    return out


def _floats(
    context: LaunchContext,
    value: ir.Value | None,
    use: str,
    change: Callable[[NDArray[np.float32]], NDArray[np.float32]] = np.asarray,
) -> WeightArgument:
    """A stored tensor in 32-bit floats, under a name of its own: other readers may have it in 16 bits."""
    assert value is not None
    name = f"{value.name}.{use}"
    return context.builder.weight(name, "fp32", lambda: np.ascontiguousarray(change(float32_values(value))))
