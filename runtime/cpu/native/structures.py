"""The structures of the C sources, as ctypes: field for field what paged_attention.h and launch.h declare.

abi_layouts.h, made from them, has the compiler compare both.
"""

from collections.abc import Mapping
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p


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


class EmbedOperation(Structure):
    """launch.h's struct embed."""

    _fields_ = (
        ("table", POINTER(MatrixAt)),
        ("output", ViewAt),
        ("scale", c_float),
        ("by_position", c_int32),
        ("adds", c_int32),
    )


class LinearOperation(Structure):
    """launch.h's struct linear."""

    _fields_ = (
        ("matrix", POINTER(MatrixAt)),
        ("bias", c_void_p),
        ("input", ViewAt),
        ("output", ViewAt),
        ("norm", NormOf),
        ("rounding", c_int32),
        ("store", c_int32),
        ("activation", c_int32),
        ("of_logits", c_int32),
        ("static_scale", c_float),
        ("alpha", c_float),
        ("cap", c_float),
        ("numbers", c_float * 4),
    )


class NormalizeOperation(Structure):
    """launch.h's struct normalize."""

    _fields_ = (
        ("input", ViewAt),
        ("output", ViewAt),
        ("residual", ViewAt),
        ("norm", NormOf),
        ("columns", c_int32),
        ("groups", c_int32),
        ("of_logits", c_int32),
    )


class CombineOperation(Structure):
    """launch.h's struct combine."""

    _fields_ = (
        ("a", ViewAt),
        ("b", ViewAt),
        ("output", ViewAt),
        ("kind", c_int32),
        ("activation", c_int32),
        ("columns", c_int32),
        ("of_logits", c_int32),
        ("number", c_float),
        ("scale", c_float),
        ("cap", c_float),
        ("numbers", c_float * 4),
        ("broadcast", c_int32),
    )


class RotateOperation(Structure):
    """launch.h's struct rotate."""

    _fields_ = (
        ("input", ViewAt),
        ("output", ViewAt),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("heads", c_int32),
        ("dim", c_int32),
        ("half", c_int32),
    )


class ExpertsOperation(Structure):
    """launch.h's struct experts."""

    _fields_ = (
        ("logits", ViewAt),
        ("input", ViewAt),
        ("output", ViewAt),
        ("bias", c_void_p),
        ("up", POINTER(LinearOperation)),
        ("down", POINTER(LinearOperation)),
        ("count", c_int32),
        ("chosen", c_int32),
        ("score", c_int32),
        ("groups", c_int32),
        ("chosen_groups", c_int32),
        ("group_best", c_int32),
        ("normalise", c_int32),
        ("adds", c_int32),
        ("of_logits", c_int32),
        ("least_sum", c_float),
        ("scale", c_float),
    )


class ConvolveOperation(Structure):
    """launch.h's struct convolve."""

    _fields_ = (
        ("input", ViewAt),
        ("output", ViewAt),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("states", c_void_p),
        ("state_stride", c_int64),
        ("channels", c_int32),
        ("taps", c_int32),
        ("activation", c_int32),
    )


class DeltaRuleOperation(Structure):
    """launch.h's struct delta_rule."""

    _fields_ = (
        ("query", ViewAt),
        ("key", ViewAt),
        ("value", ViewAt),
        ("decay", ViewAt),
        ("beta", ViewAt),
        ("output", ViewAt),
        ("states", c_void_p),
        ("state_stride", c_int64),
        ("key_heads", c_int32),
        ("heads", c_int32),
        ("key_dim", c_int32),
        ("value_dim", c_int32),
        ("normalize", c_int32),
        ("scale", c_float),
    )


class ScanOperation(Structure):
    """launch.h's struct scan."""

    _fields_ = (
        ("input", ViewAt),
        ("dt", ViewAt),
        ("b", ViewAt),
        ("c", ViewAt),
        ("output", ViewAt),
        ("a", c_void_p),
        ("d", c_void_p),
        ("states", c_void_p),
        ("state_stride", c_int64),
        ("heads", c_int32),
        ("head_dim", c_int32),
        ("state_dim", c_int32),
        ("groups", c_int32),
    )


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
    )


class Sequences(Structure):
    """recurrent.h's struct sequences."""

    _fields_ = (
        ("query_starts", c_void_p),
        ("context_lens", c_void_p),
        ("slots", c_void_p),
        ("num_sequences", c_int32),
        ("threads", c_int32),
    )


STRUCTURES: Mapping[str, type[Structure]] = {
    "layer": Layer,
    "step": NativeStep,
    "matrix": MatrixAt,
    "view": ViewAt,
    "norm": NormOf,
    "embed": EmbedOperation,
    "linear": LinearOperation,
    "normalize": NormalizeOperation,
    "combine": CombineOperation,
    "experts": ExpertsOperation,
    "rotate": RotateOperation,
    "convolve": ConvolveOperation,
    "delta_rule": DeltaRuleOperation,
    "scan": ScanOperation,
    "low_rank_tile": LowRankTile,
    "low_rank": LowRankAt,
    "operation": OperationAt,
    "batch": Batch,
    "sequences": Sequences,
}
"""All of them by their names in C."""
