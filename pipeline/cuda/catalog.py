"""Every kernel's launch signature: its arguments in order with their types. What is not listed is a constant.

    T      activations and plain weights: fp16 or bf16            KV     elements of the KV pool
    C      codes of a quantized operand                           S      scales of a quantized operand
    OUT    what a product is stored as: T, or fp32 for logits and for parts that are still to be added

Names and order are those of the kernel's function, which a test compares. To add a kernel: its file in kernels/, its
line here.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Signature:
    """A kernel's function as `module.function` of ingot.kernels, and its run-time arguments as name -> type."""

    function: str
    arguments: Mapping[str, str]


def _signature(function: str, text: str) -> Signature:
    """`a b: *T; c: i32` -> {a: *T, b: *T, c: i32}."""
    arguments: dict[str, str] = {}
    for part in text.split(";"):
        names, kind = part.split(":")
        arguments |= dict.fromkeys(names.split(), kind.strip())
    return Signature(function, arguments)


_STRIDES = "block_stride head_stride value_offset scale_block_stride scale_value_offset: i32"

CATALOG: Mapping[str, Signature] = {
    "rms_norm": _signature(
        "norm.rms_norm",
        "x residual weight out sum_out: *T; x_stride residual_stride out_stride: i32; epsilon: fp32",
    ),
    "gather_rows": _signature("gather.gather_rows", "indices: *i64; table out: *T; table_stride: i32; out_stride: i32"),
    "gather_quantized_rows": _signature(
        "gather.gather_quantized_rows",
        "indices: *i64; codes: *C; scales: *S; zero_points: *u8; out: *T; codes_stride scales_stride out_stride: i32",
    ),
    "gated_activation": _signature(
        "gated_activation.gated_activation", "gate_up out: *T; gate_up_stride out_stride: i32"
    ),
    "add_rows": _signature("elementwise.add_rows", "left right out: *T; left_stride right_stride out_stride: i32"),
    "rotary_kv_write": _signature(
        "rotary_kv_write.rotary_kv_write",
        "qkv: *T; positions slots: *i64; cos sin: *fp32; q_out: *T; pool: *KV; scales: *fp16; "
        f"qkv_stride q_out_stride: i32; {_STRIDES}",
    ),
    "decode_attention": _signature(
        "decode_attention.decode_attention",
        "q: *T; pool: *KV; scales: *fp16; tables lengths: *i32; sums weights: *fp32; scale softcap: fp32; window: i32; "
        f"q_stride table_stride: i32; {_STRIDES}",
    ),
    "join_chunks": _signature(
        "decode_attention.join_chunks",
        "sums weights: *fp32; lengths: *i32; sinks: *fp32; out: *T; window chunks out_stride: i32",
    ),
    "ragged_attention": _signature(
        "ragged_attention.ragged_attention",
        "q: *T; pool: *KV; scales: *fp16; tables lengths query_starts tile_sequences tile_starts: *i32; sinks: *fp32; "
        f"out: *T; scale softcap: fp32; window: i32; q_stride out_stride table_stride: i32; {_STRIDES}",
    ),
    "matmul_nbits": _signature(
        "matmul_nbits.matmul_nbits",
        "x: *T; codes: *u8; scales: *S; zero_points: *u8; bias: *T; out: *OUT; rows x_stride out_stride: i32",
    ),
    "add_splits": _signature("matmul_nbits.add_splits", "parts: *fp32; bias: *T; out: *OUT; rows out_stride: i32"),
    "matmul": _signature(
        "matmul.matmul",
        "x weight: *C; x_scales weight_scales: *fp32; bias: *T; out: *OUT; rows x_stride out_stride: i32",
    ),
    "quantize_rows": _signature("matmul.quantize_rows", "x: *T; codes: *C; scales: *fp32; x_stride: i32"),
    "greedy": _signature("sampling.greedy", "logits: *fp32; tokens: *i64; stride: i32"),
    "draw": _signature(
        "sampling.draw",
        "logits temperatures: *fp32; top_ks: *i32; top_ps uniforms: *fp32; tokens: *i64; stride: i32",
    ),
}
