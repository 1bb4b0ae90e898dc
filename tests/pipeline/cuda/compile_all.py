"""Compiles every kernel of the catalogue for every SM, in small shapes, and prints what came out as JSON.

A process of its own: where Triton interprets kernels it cannot compile them.
"""

import json
from collections.abc import Iterator

from ingot.artifact.launch_program import Constant, Kernel
from ingot.errors import BuildError
from ingot.pipeline.cuda.catalog import make_kernel
from ingot.pipeline.cuda.cubins import FLOAT8, compile_kernel
from ingot.pipeline.targets import SMS

KV_TYPES = ("fp16", FLOAT8, "i8", "u8")  # by kernels/kv_precision.py
CODE_TYPES = ("bf16", FLOAT8, "i8")
HEADS: dict[str, Constant] = {"DIM": 64, "BLOCK_DIM": 64, "BLOCK_TOKENS": 16}
ATTENTION: dict[str, Constant] = {**HEADS, "TILE": 32, "DTYPE": "fp16"}
NBITS: dict[str, Constant] = {
    "N": 64,
    "COLUMNS": 128,
    "SPANS": 2,
    "GROUP": 32,
    "GROUPS": 4,
    "TILE_ROWS": 16,
    "TILE": 32,
}


def requests() -> Iterator[Kernel]:
    """Every kernel, in every precision that it has."""
    half, rows = {"T": "bf16"}, {"COLUMNS": 172, "BLOCK": 256}
    yield make_kernel("carry_tokens", {}, {"BLOCK": 128})
    yield make_kernel("rms_norm", half, {**rows, "HAS_RESIDUAL": True})
    yield make_kernel("gather_rows", half, rows)
    quantized = {**rows, "GROUP": 32, "HAS_ZERO_POINTS": True}
    yield make_kernel("gather_quantized_rows", {**half, "C": "u8", "S": "fp32"}, quantized)
    for kind in range(3):
        yield make_kernel("gated_activation", half, {**rows, "KIND": kind})
    for kind, pool in enumerate(KV_TYPES):
        yield from pool_requests(kind, {"T": "fp16", "KV": pool})
    joined: dict[str, Constant] = {"HEADS": 8, "DIM": 64, "BLOCK_DIM": 64, "CHUNK": 64, "HAS_SINKS": True}
    yield make_kernel("join_chunks", half, joined)
    nbits: dict[str, Constant] = {**NBITS, "SPLITS": 2, "HAS_ZERO_POINTS": True, "HAS_BIAS": False, "DTYPE": "bf16"}
    types = {**half, "S": "fp16", "OUT": "fp32"}
    for bits, scale_weights in ((4, False), (4, True), (8, False)):
        form = {**nbits, "BITS": bits, "SCALE_WEIGHTS": scale_weights}
        yield make_kernel("matmul_nbits", types, form, frozenset({"x_stride"}))
    yield make_kernel("add_rows", half, rows)
    yield make_kernel("add_splits", {**half, "OUT": "fp32"}, {"N": 64, "SPLITS": 2, "BLOCK": 64, "HAS_BIAS": True})
    for kind, codes in enumerate(CODE_TYPES):
        tiles: dict[str, Constant] = {"TILE_ROWS": 32, "TILE": 32, "TILE_COLUMNS": 32, "BAND": 4}
        constants = {"N": 64, "COLUMNS": 128, **tiles, "KIND": kind, "HAS_BIAS": True, "UPCAST": False}
        yield make_kernel("matmul", {**half, "C": codes, "OUT": "bf16"}, constants)
        if kind:
            yield make_kernel("quantize_rows", {**half, "C": codes}, {**rows, "KIND": kind})
    for kernel in ("greedy", "draw"):
        yield make_kernel(kernel, {}, {"VOCABULARY": 300, "BLOCK": 128})


def pool_requests(kind: int, types: dict[str, str]) -> Iterator[Kernel]:
    """The kernels that read or write the KV pool, in one of its precisions."""
    width = 32 if kind == 3 else 64
    written: dict[str, Constant] = {**HEADS, "HEADS": 8, "KV_HEADS": 2, "ROTARY": 64, "KIND": kind}
    yield make_kernel("rotary_kv_write", types, written)
    read: dict[str, Constant] = {**ATTENTION, "GROUP": 4, "WIDTH": width, "KIND": kind, "HAS_SOFTCAP": True}
    yield make_kernel("decode_attention", types, {**read, "KV_HEADS": 2, "BLOCK_GROUP": 16, "CHUNK": 64})
    yield make_kernel("ragged_attention", types, {**read, "BLOCK_GROUP": 4, "TILE_QUERIES": 8, "HAS_SINKS": True})


def outcome(request: Kernel, sm: int) -> dict[str, object]:
    """What became of one kernel."""
    row: dict[str, object] = {"kernel": request.name, "sm": sm, "float8": f"*{FLOAT8}" in request.types}
    try:
        code, facts = compile_kernel(request, sm)
    except BuildError as error:
        return {**row, "error": str(error)}
    is_elf = code.startswith(b"\x7fELF")
    return {**row, "error": None, "code_starts_with_elf": is_elf, "shared_bytes": facts.shared_bytes}


if __name__ == "__main__":
    print(json.dumps([outcome(request, sm) for request in requests() for sm in SMS]))
