"""Launch signatures of all kernels: run-time arguments in order with their types. Other parameters are constants.

    T      activations and plain weights: fp16 or bf16            KV     elements of the KV pool
    C      codes of a quantized operand                           S      scales of a quantized operand
    W      weight of a matmul: T, or codes                        OUT    result of a matmul: T, or fp32 for logits
    X      result of a matmul as input: T, or fp32 for            and for split-K partials
           split-K partials that the reader adds

Names and order are those of the kernel's function; a test compares them. To add a kernel, write its file in kernels/
and its line here.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ingot.artifact.programs.launch_program import Constant, Kernel
from ingot.errors import UsageError, one_of, unknown


@dataclass(frozen=True)
class Signature:
    """A kernel's function as `module.function` of ingot.kernels, and its run-time arguments as name -> type.

    worker_warps    warps that the function starts besides its own, for other work (warp specialization)
    sm              the only SM that it is for; None: all
    """

    function: str
    arguments: Mapping[str, str]
    worker_warps: int = 0
    sm: int | None = None

    def index(self, argument: str) -> int:
        """Return the position of an argument."""
        return list(self.arguments).index(argument)


def _signature(function: str, text: str, *, worker_warps: int = 0, sm: int | None = None) -> Signature:
    """Parse `a b: *T; c: i32` to {a: *T, b: *T, c: i32}."""
    arguments: dict[str, str] = {}
    for part in text.split(";"):
        names, kind = part.split(":")
        arguments |= dict.fromkeys(names.split(), kind.strip())
    return Signature(function, arguments, worker_warps, sm)


_TILES = "pairs tile_experts tile_starts tile_ends: *i32"
_STRIDES = "block_stride head_stride value_offset scale_block_stride scale_value_offset: i32"
_RAGGED = (
    "q: *T; pool: *KV; scales: *fp16; tables lengths query_starts tile_sequences tile_starts: *i32; sinks: *fp32; "
    f"out: *T; scale softcap: fp32; window: i32; q_stride out_stride table_stride: i32; {_STRIDES}"
)
_LATENT_SIZES = (
    "scale: fp32; q_offset q_stride absorbed_stride out_stride table_stride block_stride scale_block_stride: i32"
)

_PACKED = (
    "x: *T; codes: *u8; scales: *S; zero_points: *u8; bias: *T; out: *OUT; rows x_stride out_stride: i32; "
    "alpha softcap: fp32"
)
_ADAPTERS = "units rows: *i32"

_STATES = "states: *fp32; state_slots lengths query_starts: *i32"
_RATES = "decay gate rate"

SIGNATURES: Mapping[str, Signature] = {
    "carry_tokens": _signature("carry_tokens.carry_tokens", "input_ids: *i64; carried: *i32; tokens: *i64; rows: i32"),
    "rms_norm": _signature(
        "norm.rms_norm",
        "x: *X; residual inner_weight weight out sum_out: *T; indices: *i64; codes: *C; scales: *fp32; "
        "x_stride part_stride residual_stride sum_stride out_stride: i32; inner_epsilon epsilon static_scale: fp32",
    ),
    "layer_norm": _signature(
        "norm.layer_norm",
        "x: *X; residual weight bias out sum_out: *T; indices: *i64; codes: *C; scales: *fp32; "
        "x_stride part_stride residual_stride sum_stride out_stride: i32; epsilon static_scale: fp32",
    ),
    "gather_rows": _signature(
        "gather.gather_rows",
        "indices: *i64; carried: *i32; tokens: *i64; table out: *T; table_stride out_stride: i32; alpha: fp32",
    ),
    "gather_quantized_rows": _signature(
        "gather.gather_quantized_rows",
        "indices: *i64; carried: *i32; tokens: *i64; codes: *u8; scales: *S; zero_points: *u8; out: *T; "
        "out_stride: i32; alpha: fp32",
    ),
    "gated_activation": _signature(
        "gated_activation.gated_activation",
        "gate up: *X; numbers: *fp32; out: *T; "
        "gate_stride gate_part_stride up_offset up_stride up_part_stride out_stride: i32",
    ),
    "combine_rows": _signature(
        "elementwise.combine_rows",
        "left: *X; right out: *T; left_stride left_part_stride right_stride out_stride: i32",
    ),
    "map_rows": _signature(
        "elementwise.map_rows",
        "x: *X; numbers: *fp32; out: *OUT; x_offset x_stride part_stride out_stride: i32; alpha softcap: fp32",
    ),
    "gather_columns": _signature(
        "elementwise.gather_columns", "x: *T; columns: *i64; out: *T; x_stride out_stride: i32"
    ),
    "rotary_kv_write": _signature(
        "rotary_kv_write.rotary_kv_write",
        "q k v: *X; positions slots: *i64; cos sin: *fp32; q_norm k_norm q_out: *T; pool: *KV; scales: *fp16; "
        f"epsilon: fp32; q_stride k_stride v_stride part_stride q_out_stride: i32; {_STRIDES}",
    ),
    "rotate_heads": _signature(
        "rotary_kv_write.rotate_heads", "x: *T; positions: *i64; cos sin: *fp32; out: *T; x_stride out_stride: i32"
    ),
    "decode_attention": _signature(
        "decode_attention.decode_attention",
        "q: *T; pool: *KV; scales: *fp16; tables lengths: *i32; sinks sums weights: *fp32; counters: *i32; out: *T; "
        f"scale softcap: fp32; window: i32; q_stride out_stride table_stride: i32; {_STRIDES}",
    ),
    "ragged_attention": _signature("ragged_attention.ragged_attention", _RAGGED),
    "prefill_attention": _signature("prefill_attention.prefill_attention", _RAGGED, worker_warps=8, sm=90),
    "fixed_split_attention": _signature(
        "fixed_split_attention.fixed_split_attention",
        "q: *T; pool: *KV; scales: *fp16; tables lengths query_starts tile_sequences tile_starts: *i32; "
        "sinks sums weights: *fp32; out: *T; scale softcap: fp32; window: i32; q_stride out_stride table_stride: i32; "
        f"{_STRIDES}",
    ),
    "join_fixed_splits": _signature(
        "fixed_split_attention.join_fixed_splits",
        "sums weights: *fp32; positions: *i64; sinks: *fp32; out: *T; window out_stride: i32",
    ),
    "latent_kv_write": _signature(
        "latent_attention.latent_kv_write",
        "latent rope: *X; positions slots: *i64; cos sin: *fp32; norm: *T; pool: *KV; scales: *fp16; epsilon: fp32; "
        "latent_offset rope_offset x_stride part_stride block_stride scale_block_stride: i32",
    ),
    "latent_decode_attention": _signature(
        "latent_attention.latent_decode_attention",
        "q absorbed: *T; cos sin: *fp32; pool: *KV; scales: *fp16; tables lengths: *i32; sums weights: *fp32; "
        f"counters: *i32; out: *T; {_LATENT_SIZES}",
    ),
    "latent_ragged_attention": _signature(
        "latent_attention.latent_ragged_attention",
        "q absorbed: *T; cos sin: *fp32; pool: *KV; scales: *fp16; "
        f"tables lengths query_starts tile_sequences tile_starts: *i32; out: *T; {_LATENT_SIZES}",
    ),
    "head_matmul": _signature("head_matmul.head_matmul", "x weight out: *T; rows x_offset x_stride out_stride: i32"),
    "head_matmul_nbits": _signature(
        "head_matmul.head_matmul_nbits",
        "x: *T; codes: *u8; scales: *S; zero_points: *u8; out: *T; rows x_offset x_stride out_stride: i32",
    ),
    "matmul_nbits": _signature("matmul_nbits.matmul_nbits", _PACKED),
    "matmul_int4": _signature("matmul_int4.matmul_int4", _PACKED),
    "matmul_int4_wide": _signature("matmul_int4_wide.matmul_int4_wide", _PACKED, worker_warps=8, sm=90),
    "dequantize_nbits": _signature(
        "matmul_nbits.dequantize_nbits", "codes: *u8; scales: *S; zero_points: *u8; out: *T; first count: i32"
    ),
    "matmul": _signature(
        "matmul.matmul",
        "x: *C; weight: *W; x_scales weight_scales: *fp32; bias: *T; out: *OUT; rows x_stride out_stride: i32; "
        "alpha softcap: fp32",
    ),
    "low_rank_shrink": _signature(
        "low_rank.low_rank_shrink",
        f"x pool: *T; table: *i64; {_ADAPTERS}; results: *fp32; columns x_stride: i32",
    ),
    "low_rank_expand": _signature(
        "low_rank.low_rank_expand",
        f"results: *fp32; pool: *T; table: *i64; spans: *i32; {_ADAPTERS}; out: *OUT; "
        "outputs out_stride part_stride: i32; alpha: fp32",
    ),
    "route_rows": _signature(
        "experts.route_rows",
        "logits: *X; bias: *fp32; slots: *i64; ids: *i32; weights: *fp32; logits_stride part_stride: i32; "
        "least_sum scale margin: fp32",
    ),
    "sort_by_expert": _signature(
        "experts.sort_by_expert",
        "ids places pairs tile_experts tile_starts tile_ends: *i32; num_pairs num_tiles: i32",
    ),
    "combine_experts": _signature(
        "experts.combine_experts",
        "results: *X; ids places: *i32; weights: *fp32; out: *T; results_stride out_stride: i32",
    ),
    "grouped_matmul": _signature(
        "grouped_matmul.grouped_matmul", f"x weight bias: *T; out: *OUT; {_TILES}; x_stride out_stride: i32"
    ),
    "grouped_matmul_nbits": _signature(
        "grouped_matmul.grouped_matmul_nbits",
        f"x: *T; codes: *u8; scales: *S; zero_points: *u8; bias: *T; out: *OUT; {_TILES}; x_stride out_stride: i32",
    ),
    "grouped_matmul_int4": _signature(
        "grouped_matmul.grouped_matmul_int4",
        f"x: *T; codes: *u8; scales: *S; zero_points: *u8; bias: *T; out: *OUT; {_TILES}; x_stride out_stride: i32",
    ),
    "short_convolution": _signature(
        "short_convolution.short_convolution",
        f"x: *X; weight bias: *fp32; out: *T; {_STATES}; tile_sequences tile_starts: *i32; "
        "x_stride part_stride out_stride slot_stride: i32",
    ),
    "recurrence_rates": _signature(
        "recurrence.recurrence_rates",
        "x: *X; bias factors out: *fp32; x_offset x_stride part_stride: i32; least most alpha: fp32",
    ),
    "recurrence": _signature(
        "recurrence.recurrence",
        f"q k v: *T; {_RATES} skip: *fp32; out: *T; {_STATES}; q_stride k_stride v_stride out_stride slot_stride: i32; "
        "scale: fp32",
    ),
    "recurrence_chunks": _signature(
        "chunked_recurrence.recurrence_chunks",
        f"q k: *T; {_RATES} inverses weights factors: *fp32; lengths query_starts: *i32; q_stride k_stride: i32; "
        "scale: fp32",
    ),
    "chunked_recurrence": _signature(
        "chunked_recurrence.chunked_recurrence",
        f"q k v: *T; {_RATES} skip inverses weights factors: *fp32; out: *T; {_STATES}; "
        "q_stride k_stride v_stride out_stride slot_stride: i32; scale: fp32",
    ),
    "quantize_rows": _signature(
        "norm.quantize_rows", "x: *T; codes: *C; scales: *fp32; x_stride: i32; static_scale: fp32"
    ),
    "greedy": _signature(
        "sampling.greedy",
        "logits peaks: *fp32; firsts counters: *i32; facts: *fp32; tokens: *i64; stride: i32",
    ),
    "bin_logits": _signature(
        "sampling.bin_logits",
        "logits temperatures facts: *fp32; tokens: *i64; counts: *i32; masses: *fp32; stride: i32",
    ),
    "draw": _signature(
        "sampling.draw",
        "logits temperatures: *fp32; top_ks: *i32; top_ps uniforms facts: *fp32; counts: *i32; masses values: *fp32; "
        "ids counters: *i32; tokens: *i64; stride: i32",
    ),
}


def signature(name: str) -> Signature:
    """Return a kernel's signature. UsageError with the nearest name if there is no such kernel."""
    if name not in SIGNATURES:
        raise UsageError(unknown("kernel", name, SIGNATURES, "kernels"))
    return SIGNATURES[name]


def make_kernel(
    name: str,
    types: Mapping[str, str],
    constants: Mapping[str, Constant],
    aligned: frozenset[str] = frozenset(),
    num_warps: int = 4,
    num_stages: int = 3,
) -> Kernel:
    """Return a kernel with types for the signature's letters: {"T": "fp16", "KV": "fp8e4nv", ...}.

    UsageError for an unknown name or a letter without a type.
    """
    listed = signature(name).arguments
    missing = {kind[1:] for kind in listed.values() if kind[1:].isupper()} - set(types)
    if missing:
        raise UsageError(f"{name}: types are missing for {one_of(sorted(missing))}")
    return Kernel(
        name=name,
        constants=dict(constants),
        types=tuple(f"*{types[kind[1:]]}" if kind[1:].isupper() else kind for kind in listed.values()),
        aligned=tuple(place for place, argument in enumerate(listed) if argument in aligned),
        num_warps=num_warps,
        num_stages=num_stages,
    )
