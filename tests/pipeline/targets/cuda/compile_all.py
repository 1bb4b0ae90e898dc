"""Compiles every kernel in small shapes for one SM, and prints the outcomes as JSON.

Runs as a process of its own: a process whose Triton interprets kernels cannot compile them.
"""

import json
import sys
from collections.abc import Iterator

from ingot.artifact.programs.launch_program import Constant, Kernel
from ingot.errors import BuildError
from ingot.pipeline.targets.cuda.cubins import FLOAT8, compile_kernel
from ingot.pipeline.targets.cuda.kernel_signatures import make_kernel
from ingot.pipeline.targets.table import SMS

KV_TYPES = ("fp16", FLOAT8, "i8", "u8")  # by kernels/kv_precision.py
HEADS: dict[str, Constant] = {"DIM": 64, "BLOCK_DIM": 64, "BLOCK_TOKENS": 16}
ATTENTION: dict[str, Constant] = {**HEADS, "TILE": 32, "DTYPE": "fp16"}
CHUNKS: dict[str, Constant] = {"CHUNKS": 24, "FILLING": 16, "USUAL_CHUNK": 128, "TILE": 32}
ROWS: dict[str, Constant] = {"COLUMNS": 172, "BLOCK": 256}
SPANS: dict[str, Constant] = {"SPANS": 2, "GROUP": 32, "HAS_ZERO_POINTS": True}
FINISH: dict[str, Constant] = {"HAS_BIAS": True, "HAS_SOFTCAP": True}
HALF = {"T": "bf16", "X": "bf16", "OUT": "bf16"}
PARTIALS = {**HALF, "X": "fp32", "OUT": "fp32"}


def requests() -> Iterator[Kernel]:
    """Yield every kernel in each of its precisions."""
    yield make_kernel("carry_tokens", {}, {"BLOCK": 128})
    norm: dict[str, Constant] = {**ROWS, "HAS_INNER": True, "HAS_RESIDUAL": True, "HAS_OUTER": True}
    yield make_kernel("rms_norm", {**PARTIALS, "C": "u8"}, {**norm, "PARTS": 4, "GATHERS": True})
    for kind, codes in ((1, FLOAT8), (2, "i8")):
        rounds: dict[str, Constant] = {"KIND": kind, "IS_STATIC": kind == 1, "STORES": kind == 2}
        yield make_kernel("rms_norm", {**PARTIALS, "C": codes}, {**norm, "PARTS": 1, **rounds})
    yield make_kernel("gather_rows", HALF, {**ROWS, "CARRIES": True})
    for bits in (4, 8):
        yield make_kernel(
            "gather_quantized_rows",
            {**HALF, "S": "fp32"},
            {**ROWS, **SPANS, "TABLE_ROWS": 9, "BITS": bits, "CARRIES": bits == 4},
        )
    for bias in (False, True):
        layer: dict[str, Constant] = {**ROWS, "HAS_RESIDUAL": bias, "HAS_BIAS": bias, "PARTS": 4}
        yield make_kernel("layer_norm", {**PARTIALS, "C": "i8"}, {**layer, "KIND": 2 * bias, "GATHERS": not bias})
    for kind in range(9):
        form: dict[str, Constant] = {"KIND": kind, "INTERLEAVED": kind % 2 > 0}
        yield make_kernel("gated_activation", PARTIALS, {**ROWS, "PARTS": 2, **form})
    yield make_kernel("map_rows", PARTIALS, {**ROWS, "PARTS": 2, "KIND": 3, "HAS_SOFTCAP": True})
    yield make_kernel("combine_rows", HALF, {**ROWS, "PARTS": 1, "KIND": 0})
    yield make_kernel("gather_columns", HALF, ROWS)
    yield make_kernel("rotate_heads", HALF, {"DIM": 80, "BLOCK_DIM": 128, "ROTARY": 32})
    for kind, pool in enumerate(KV_TYPES):
        yield from pool_requests(kind, {"T": "fp16", "X": "fp32" if kind == 3 else "fp16", "KV": pool})
    fixed: dict[str, Constant] = {"HEADS": 8, "DIM": 64, "BLOCK_DIM": 64, "SPLITS": 3, "SPLIT": 64, "AT_ONCE": 8}
    yield make_kernel("join_fixed_splits", HALF, {**fixed, "HAS_SINKS": True})
    yield from matmul_requests()
    yield from expert_requests()
    yield from recurrent_requests()
    yield from latent_requests()
    yield from low_rank_requests()
    rows: dict[str, Constant] = {"VOCABULARY": 300, "BLOCK": 128, "PARTS": 4}
    yield make_kernel("greedy", {}, rows)
    yield make_kernel("bin_logits", {}, {**rows, "BINS": 64})
    yield make_kernel("draw", {}, {**rows, "BINS": 64, "CANDIDATES": 128})


def expert_requests() -> Iterator[Kernel]:
    """The kernels of mixtures of experts."""
    sizes: dict[str, Constant] = {"COUNT": 12, "BLOCK": 16, "CHOSEN": 3, "BLOCK_CHOSEN": 4, "PARTS": 2}
    for score, chosen_groups in ((0, 4), (1, 2)):
        groups: dict[str, Constant] = {"GROUPS": 4, "CHOSEN_GROUPS": chosen_groups}
        form: dict[str, Constant] = {
            "SCORE": score,
            "NORMALISES": True,
            "HAS_BIAS": score == 1,
            "GROUP_BEST": 1 + score,
        }
        yield make_kernel("route_rows", PARTIALS, {**sizes, **groups, **form})
    alone: dict[str, Constant] = {"GROUPS": 1, "CHOSEN_GROUPS": 1, "NORMALISES": False, "HAS_BIAS": False}
    yield make_kernel("route_rows", PARTIALS, {**sizes, **alone, "SCORE": 2})
    yield make_kernel("sort_by_expert", {}, {"COUNT": 12, "BINS": 16, "BLOCK": 1024, "TILE_ROWS": 16})
    yield make_kernel("combine_experts", HALF, {**ROWS, "CHOSEN": 3})
    tile: dict[str, Constant] = {"N": 64, "COLUMNS": 128, "TILE_ROWS": 16, "TILE": 64, "HAS_BIAS": True, "CHOSEN": 3}
    aligned = frozenset({"x_stride", "out_stride"})
    for gate in ({}, {"GATE": 0, "CHOSEN": 0, "HAS_BIAS": False}):
        plain: dict[str, Constant] = {**tile, "TILE_COLUMNS": 64, "UPCAST": False, **gate}
        yield make_kernel("grouped_matmul", HALF, plain, aligned)
        types, packed = {**HALF, "S": "fp16"}, {**tile, **SPANS, "GROUPS": 4, "DTYPE": "bf16", **gate}
        for bits in (4, 8):
            own: dict[str, Constant] = {"BITS": bits, "SPANS_AT_ONCE": 1, "SCALE_WEIGHTS": bool(gate)}
            yield make_kernel("grouped_matmul_nbits", types, {**packed, **own}, aligned)
        for ahead in (2, 3):
            own = {"SPANS": 1, "AHEAD": ahead, "WARPS": 4}
            yield make_kernel("grouped_matmul_int4", types, {**packed, **own}, aligned)


def recurrent_requests() -> Iterator[Kernel]:
    """The kernels of recurrent layers."""
    taps: dict[str, Constant] = {"CHANNELS": 96, "BLOCK": 64, "TAPS": 4, "BLOCK_TAPS": 4, "HAS_SILU": True}
    for ragged in (False, True):
        form: dict[str, Constant] = {"RAGGED": ragged, "TILE": 32 if ragged else 1, "HAS_BIAS": ragged}
        yield make_kernel("short_convolution", HALF if ragged else PARTIALS, {**taps, **form, "PARTS": 2 - ragged})
    for curve in range(3):
        rate: dict[str, Constant] = {"COLUMNS": 32, "BLOCK": 32, "PARTS": 2, "CURVE": curve}
        yield make_kernel("recurrence_rates", PARTIALS, {**rate, "HAS_BIAS": True, "HAS_FACTORS": True}, num_warps=1)
    for scan in (False, True):
        state: dict[str, Constant] = {"HEADS": 8, "KEY_HEADS": 2, "KEYS": 64, "BLOCK_KEYS": 64, "IS_SCAN": scan}
        whole: dict[str, Constant] = {**state, "VALUES": 80, "TILE": 16}
        own: dict[str, Constant] = {"NORMALIZES": not scan, "RAGGED": scan, "MOST": 16 * scan}
        yield make_kernel("recurrence", HALF, {**whole, **own}, num_warps=1)
        chunk: dict[str, Constant] = {"CHUNK": 32, "LEAST": 17, "EXACT": False}
        sizes: dict[str, Constant] = {"SEQUENCES": 5, "BLOCK_SEQUENCES": 8, "NORMALIZES": not scan}
        yield make_kernel("recurrence_chunks", HALF, {**state, **chunk, **sizes})
        yield make_kernel("chunked_recurrence", HALF, {**whole, **chunk})


def latent_requests() -> Iterator[Kernel]:
    """The kernels of latent attention, in every precision that stores latents."""
    sizes: dict[str, Constant] = {"RANK": 128, "BLOCK_RANK": 128, "ROPE": 32, "BLOCK_ROPE": 32, "BLOCK_TOKENS": 16}
    for kind, pool in enumerate(KV_TYPES[:3]):
        types, own = {**PARTIALS, "KV": "bf16" if kind == 0 else pool}, {**sizes, "KIND": kind}
        yield make_kernel("latent_kv_write", types, {**own, "PARTS": 1 + kind})
        heads: dict[str, Constant] = {**own, "HEADS": 20, "HEAD_DIM": 96, "TILE": 32, "DTYPE": "bf16"}
        chunks: dict[str, Constant] = {"BLOCK_HEADS": 32, "CHUNKS": 24, "FILLING": 16, "USUAL_CHUNK": 128}
        yield make_kernel("latent_decode_attention", types, {**heads, **chunks})
        yield make_kernel("latent_ragged_attention", types, {**heads, "BLOCK_HEADS": 16, "QUERIES": 2})
    tile: dict[str, Constant] = {"HEAD_STRIDE": 192, "N": 64, "COLUMNS": 128, "TILE_ROWS": 16, "TILE": 64}
    yield make_kernel("head_matmul", HALF, {**tile, "TILE_COLUMNS": 64}, frozenset({"x_stride", "out_stride"}))
    for bits in (4, 8):
        form: dict[str, Constant] = {**SPANS, "GROUPS": 4, "BITS": bits, "SPANS_AT_ONCE": 1, "DTYPE": "bf16"}
        yield make_kernel("head_matmul_nbits", {**HALF, "S": "fp16"}, {**tile, **form, "SCALE_WEIGHTS": bits == 4})


def low_rank_requests() -> Iterator[Kernel]:
    """The kernels of adapters, of few rows and of many, in float32 too."""
    aligned = frozenset({"columns", "x_stride", "outputs", "out_stride", "part_stride"})
    for types, rows, splits in ((HALF, 16, 8), (PARTIALS, 64, 1), ({"T": "fp32", "OUT": "fp32"}, 16, 4)):
        tile: dict[str, Constant] = {"SPLITS": splits, "TILE_ROWS": rows, "TILE_RANKS": 16}
        yield make_kernel("low_rank_shrink", types, {**tile, "TILE_COLUMNS": 128, "UPCAST": False}, aligned)
        wide: dict[str, Constant] = {**tile, "TILE": 64, "PARTS": splits, "ORDER": splits % 3, "BY_ROW": rows == 16}
        yield make_kernel("low_rank_expand", types, wide, aligned)


def pool_requests(kind: int, types: dict[str, str]) -> Iterator[Kernel]:
    """The kernels that read or write the KV pool, in one of its precisions."""
    width = 32 if kind == 3 else 64
    written: dict[str, Constant] = {**HEADS, "HEADS": 8, "KV_HEADS": 2, "HEADS_AT_ONCE": 4, "ROTARY": 64, "KIND": kind}
    yield make_kernel("rotary_kv_write", types, {**written, "PARTS": 4 if kind == 3 else 1, "HAS_NORM": kind > 1})
    read: dict[str, Constant] = {**ATTENTION, "GROUP": 4, "WIDTH": width, "KIND": kind, "HAS_SOFTCAP": True}
    yield make_kernel(
        "decode_attention", types, {**read, **CHUNKS, "KV_HEADS": 2, "BLOCK_GROUP": 16, "HAS_SINKS": kind > 1}
    )
    tiles: dict[str, Constant] = {"BLOCK_GROUP": 4, "TILE_QUERIES": 16, "QUERIES": 8, "HAS_SINKS": True}
    yield make_kernel("ragged_attention", types, {**read, **tiles})
    if kind == 0:
        wide: dict[str, Constant] = {**read, **tiles, "BLOCK_GROUP": 16, "TILE": 128}
        strides = frozenset({"block_stride", "head_stride", "value_offset"})
        yield make_kernel("prefill_attention", types, wide, strides, num_warps=12)
    splits: dict[str, Constant] = {"KV_HEADS": 2, "BLOCK_GROUP": 4, "QUERIES": 8, "SPLITS": 3, "SPLIT": 64}
    yield make_kernel("fixed_split_attention", types, {**read, **splits, "HAS_SINKS": True})


def matmul_requests() -> Iterator[Kernel]:
    """Matmuls for every form of weight, whole and as split-K partials."""
    shape: dict[str, Constant] = {"N": 64, "COLUMNS": 128, **FINISH}
    for bits, scale_weights, splits in ((4, False, 2), (4, True, 1), (8, False, 1)):
        tiles: dict[str, Constant] = {"TILE_ROWS": 16, "TILE": 32, "SPLITS": splits, "SCALE_WEIGHTS": scale_weights}
        constants = {**shape, **SPANS, **tiles, "GROUPS": 4, "SPANS_AT_ONCE": 1, "BITS": bits, "DTYPE": "bf16"}
        constants["FOLDS"] = splits > 1
        if bits == 4:
            own: dict[str, Constant] = {"TILE": 64, "AHEAD": splits, "WARPS": 4, "GROUP": 64 * splits}
            common = {key: constants[key] for key in constants.keys() - {"SCALE_WEIGHTS", "SPANS_AT_ONCE", "BITS"}}
            for dtype in ("bf16", "fp16"):
                types = {"T": dtype, "OUT": "fp32", "S": "fp16"}
                direct = {**common, **own, "GROUPS": 2 // splits, "SPANS": 1, "DTYPE": dtype}
                for ahead in (splits, splits + 2):
                    made = {**direct, "AHEAD": ahead}
                    yield make_kernel("matmul_int4", types, made, frozenset({"x_stride"}))
                own_of_wide: dict[str, Constant] = {"TILE_ROWS": 64 // splits, "TILE": 256, "STAGES": 3, "GROUP": 128}
                kept = {key: direct[key] for key in direct.keys() - {"AHEAD", "WARPS"}}
                wide = {**kept, **own_of_wide, "GROUPS": 1}
                yield make_kernel("matmul_int4_wide", types, wide, frozenset({"x_stride"}), num_warps=12)
            if splits == 1:
                yield make_kernel("matmul_int4", {**HALF, "S": "fp16"}, {**direct, "DTYPE": "bf16", "GATE": 0})
        yield make_kernel("matmul_nbits", {**PARTIALS, "S": "fp16"}, constants, frozenset({"x_stride"}))
        if splits == 1:
            yield make_kernel("matmul_nbits", {**HALF, "S": "fp16"}, {**constants, "GATE": bits // 4})
        form: dict[str, Constant] = {**SPANS, "N": 64, "COLUMNS": 128, "TILE": 32, "GROUPS": 4, "BITS": bits}
        yield make_kernel("dequantize_nbits", {**HALF, "S": "fp16"}, form)
    for kind, (x, weight) in enumerate([("bf16", "bf16"), (FLOAT8, FLOAT8), ("i8", "i8"), ("bf16", FLOAT8)]):
        tiles = {"TILE_ROWS": 32, "TILE": 32, "TILE_COLUMNS": 32, "BAND": 4, "SPLITS": 1 + kind % 2}
        constants = {**shape, **tiles, "KIND": kind, "UPCAST": False, "FOLDS": kind % 2 == 1}
        yield make_kernel("matmul", {**HALF, "C": x, "W": weight}, constants)
        if kind % 2 == 0:
            yield make_kernel("matmul", {**HALF, "C": x, "W": weight}, {**constants, "GATE": kind})
    for kind, codes in ((1, FLOAT8), (2, "i8"), (2, "bf16")):
        form = {"KIND": kind, "IS_STATIC": kind == 1, "SCALES_BACK": codes == "bf16"}
        yield make_kernel("quantize_rows", {**HALF, "C": codes}, {**ROWS, **form})


def outcome(request: Kernel, sm: int) -> dict[str, object]:
    """The outcome of one kernel."""
    row: dict[str, object] = {"kernel": request.name, "float8": f"*{FLOAT8}" in request.types}
    try:
        cubin = compile_kernel(request, sm)
    except BuildError as error:
        return {**row, "error": str(error)}
    is_elf = cubin.code.startswith(b"\x7fELF")
    return {**row, "error": None, "code_starts_with_elf": is_elf, "shared_bytes": cubin.facts.shared_bytes}


def pairs() -> Iterator[tuple[Kernel, int]]:
    """Each kernel's first form for every SM, and its other forms for one SM after the other."""
    seen = set[str]()
    for number, request in enumerate(requests()):
        for sm in [SMS[number % len(SMS)]] if request.name in seen else SMS:
            yield request, sm
        seen.add(request.name)


if __name__ == "__main__":
    wanted = int(sys.argv[1])
    print(json.dumps([outcome(request, sm) for request, sm in pairs() if sm == wanted]))
