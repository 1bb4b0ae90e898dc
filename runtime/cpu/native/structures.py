"""The structures of the C sources, as ctypes: field for field what paged_attention.h and launch.h declare.

Those of operations follow from the rows of cpu_program.py, and so do their declarations in C, in abi_operations.h.
abi_layouts.h, made from all of them, has the compiler compare both.
"""

from collections.abc import Mapping
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from typing import Any, get_args

from ingot.artifact.programs.cpu_program import (
    NUMBERS,
    ApplyDeltaRule,
    Combine,
    Convolve,
    Embed,
    Experts,
    Linear,
    Normalize,
    Rotate,
    Scan,
)
from ingot.artifact.programs.operation_row import Norm, Packed, Reads, Role, Row, Vector, Writes

MAX_NUMBERS = max(map(len, NUMBERS.values()))


class Layer(Structure):
    """paged_attention.h's struct layer."""

    _fields_ = (
        ("pool", c_void_p),
        ("block_bytes", c_int64),
        ("keys", c_int64),
        ("values", c_int64),
        ("key_scales", c_int64),
        ("value_scales", c_int64),
        ("query", c_void_p),
        ("key", c_void_p),
        ("value", c_void_p),
        ("output", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("sinks", c_void_p),
        ("query_stride", c_int64),
        ("key_stride", c_int64),
        ("value_stride", c_int64),
        ("output_stride", c_int64),
        ("rotary_dim", c_int32),
        ("key_kind", c_int32),
        ("value_kind", c_int32),
        ("group", c_int32),
        ("writes", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("dim", c_int32),
        ("value_dim", c_int32),
        ("block_tokens", c_int32),
        ("window", c_int32),
        ("values_in_keys", c_int32),
        ("scale", c_float),
        ("softcap", c_float),
        ("arithmetic", c_int32),
    )


class NativeStep(Structure):
    """paged_attention.h's struct step."""

    _fields_ = (
        ("query_starts", c_void_p),
        ("context_lens", c_void_p),
        ("block_tables", c_void_p),
        ("num_sequences", c_int32),
        ("max_blocks", c_int32),
        ("threads", c_int32),
    )


class MatrixAt(Structure):
    """launch.h's struct matrix."""

    _fields_ = (
        ("tiles", c_void_p),
        ("tile_bytes", c_int64),
        ("codes_offset", c_int64),
        ("n", c_int32),
        ("k", c_int32),
        ("padded_k", c_int32),
        ("form", c_int32),
        ("block", c_int32),
        ("scale_blocks", c_int32),
        ("scale_bytes", c_int32),
        ("has_zeros", c_int32),
        ("fetch_ahead", c_int32),
    )


class ViewAt(Structure):
    """launch.h's struct view."""

    _fields_ = (("at", c_void_p), ("stride", c_int64), ("gathered", c_int32))


class NormOf(Structure):
    """launch.h's struct norm."""

    _fields_ = (("weight", c_void_p), ("bias", c_void_p), ("epsilon", c_float), ("kind", c_int32))


def fields_of(row: type[Row], *without: str) -> tuple[tuple[str, Any], ...]:
    """The fields of an operation's structure: those of its row but its name, its layer and what `without` names."""
    left_out, roles = {"kind", "node", "layer", *without}, row.roles()
    return tuple(
        (name, _type_of(roles.get(name), info.annotation))
        for name, info in row.model_fields.items()
        if name not in left_out
    )


def _type_of(role: Role | None, annotation: Any) -> Any:
    types = (annotation, *get_args(annotation))
    match role:
        case Reads() | Writes():
            return ViewAt
        case Packed():
            return POINTER(MatrixAt)
        case Vector():
            return NormOf if Norm in types else c_void_p
    if annotation == tuple[float, ...]:
        return c_float * MAX_NUMBERS
    return c_float if float in types else c_int32


class EmbedOperation(Structure):
    """Structure of cpu_program.Embed."""

    _fields_ = fields_of(Embed)


class LinearOperation(Structure):
    """Structure of cpu_program.Linear, and of an expert's layer."""

    _fields_ = fields_of(Linear)


class NormalizeOperation(Structure):
    """Structure of cpu_program.Normalize."""

    _fields_ = fields_of(Normalize)


class CombineOperation(Structure):
    """Structure of cpu_program.Combine; `b` holds its vector too."""

    _fields_ = (*fields_of(Combine, "vector"), ("number", c_float))


class RotateOperation(Structure):
    """Structure of cpu_program.Rotate."""

    _fields_ = fields_of(Rotate)


class ExpertsOperation(Structure):
    """Structure of cpu_program.Experts; the layers `up` have its norm."""

    _fields_ = (
        *fields_of(Experts, "up", "down", "norm"),
        ("up", POINTER(LinearOperation)),
        ("down", POINTER(LinearOperation)),
        ("count", c_int32),
    )


_STATES = (("states", c_void_p), ("state_stride", c_int64))


class ConvolveOperation(Structure):
    """Structure of cpu_program.Convolve."""

    _fields_ = (*fields_of(Convolve), *_STATES)


class DeltaRuleOperation(Structure):
    """Structure of cpu_program.ApplyDeltaRule."""

    _fields_ = (*fields_of(ApplyDeltaRule), *_STATES)


class ScanOperation(Structure):
    """Structure of cpu_program.Scan."""

    _fields_ = (*fields_of(Scan), *_STATES)


class LowRankTile(Structure):
    """launch.h's struct low_rank_tile."""

    _fields_ = (("at", c_int64), ("first", c_int32), ("count", c_int32))


class LowRankAt(Structure):
    """launch.h's struct low_rank."""

    _fields_ = (("a", MatrixAt), ("b", c_void_p), ("tiles", c_void_p), ("b_form", c_int32))


class OperationAt(Structure):
    """launch.h's struct operation."""

    _fields_ = (("kind", c_int32), ("arguments", c_void_p))


class Batch(Structure):
    """launch_program.h's struct batch."""

    _fields_ = (
        ("input_ids", c_void_p),
        ("position_ids", c_void_p),
        ("logits_indices", c_void_p),
        ("tokens", c_int32),
        ("logits", c_int32),
        ("attention", NativeStep),
        ("state_slots", c_void_p),
        ("num_states", c_int32),
        ("adapter_slots", c_void_p),
        ("is_computing", POINTER(c_int32)),
        ("begin", c_int32),
        ("end", c_int32),
    )


class Sequences(Structure):
    """recurrent.h's struct sequences."""

    _fields_ = (
        ("query_starts", c_void_p),
        ("context_lens", c_void_p),
        ("slots", c_void_p),
        ("num_sequences", c_int32),
        ("threads", c_int32),
        ("first_tile", c_int32),
        ("num_tiles", c_int32),
    )


class RankPart(Structure):
    """tensor_parallel.h's struct rank_part."""

    _fields_ = (
        ("bounds", c_void_p),
        ("owners", c_void_p),
        ("output", c_void_p),
        ("stride", c_int64),
        ("rows", c_int32),
        ("first", c_int32),
        ("count", c_int32),
        ("shares_keys", c_int32),
    )


class RankGroup(Structure):
    """tensor_parallel.h's struct rank_group."""

    _fields_ = (
        ("parts", c_void_p),
        ("memory", c_void_p),
        ("slot_floats", c_int64),
        ("rank", c_int32),
        ("ranks", c_int32),
    )


OPERATIONS: Mapping[str, type[Structure]] = {
    "embed": EmbedOperation,
    "linear": LinearOperation,
    "normalize": NormalizeOperation,
    "combine": CombineOperation,
    "experts": ExpertsOperation,
    "rotate": RotateOperation,
    "convolve": ConvolveOperation,
    "delta_rule": DeltaRuleOperation,
    "scan": ScanOperation,
}
"""The structures of operations but attention, whose is Layer."""
STRUCTURES: Mapping[str, type[Structure]] = {
    "layer": Layer,
    "step": NativeStep,
    "matrix": MatrixAt,
    "view": ViewAt,
    "norm": NormOf,
    **OPERATIONS,
    "low_rank_tile": LowRankTile,
    "low_rank": LowRankAt,
    "operation": OperationAt,
    "batch": Batch,
    "sequences": Sequences,
    "rank_part": RankPart,
    "rank_group": RankGroup,
}
"""All of them by their names in C."""
