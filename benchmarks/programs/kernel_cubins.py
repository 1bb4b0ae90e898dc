"""Compile the kernels in the shapes of Llama-3.1-8B, with heads of 64 and 256, and those of experts in the shapes of
Qwen3-30B-A3B: one JSON list on stdout.

    python -m benchmarks.programs.kernel_cubins [--sm 90]

Runs in a process of its own, because Triton cannot compile where it interprets. Rows: kernel, form, SM, registers per
thread, spilled bytes, shared memory per block, bytes of the cubin. A kernel without a shape here is compiled in the
small shapes of its tests (tests/pipeline/targets/cuda/compile_all.py): to give it a real one, add it to `requests`.
"""

import argparse
import json
from collections.abc import Iterator

from tests.pipeline.targets.cuda import compile_all

from benchmarks.programs.kernel_errors import LONG_BLOCK, LONG_BLOCKS
from benchmarks.programs.sass import Sass, disassemble
from ingot.artifact.programs.launch_program import Constant, Kernel
from ingot.pipeline.targets.cuda.attention_operands import Chunks, HeadSizes
from ingot.pipeline.targets.cuda.cubins import FLOAT8, compile_kernel
from ingot.pipeline.targets.cuda.kernel_signatures import SIGNATURES, make_kernel
from ingot.pipeline.targets.cuda.lower.attention import (
    decode_stages,
    ragged_tile,
    specialized_tile,
)
from ingot.pipeline.targets.cuda.lowering import HISTOGRAM_BINS, MOST_CANDIDATES
from ingot.pipeline.targets.cuda.program_builder import SAMPLER_WARPS, TILE_QUERIES
from ingot.pipeline.targets.cuda.tiles import (
    FEW_ROWS,
    MatmulKernel,
    MatmulShape,
    TileTable,
    grouped_tile,
    packed_constants,
    safe_tile,
    span_columns,
)
from ingot.pipeline.targets.table import FLOAT8_FROM, SMS
from ingot.sizes import ceil_div, next_power_of_two

HIDDEN, FFN, KV_HEADS, VOCABULARY = 4096, 14336, 8, 128256
EXPERTS, CHOSEN, EXPERT_HIDDEN, EXPERT_FFN = 128, 8, 2048, 768
USUAL_BLOCK = 16  # tokens of a block of the KV pool
POOLS = {"16-bit": "fp16", "fp8": FLOAT8, "int8": "i8", "int4": "u8"}  # in the order of kernels/kv_precision.py
STRIDES = ("block_stride", "head_stride", "value_offset", "scale_block_stride", "scale_value_offset")
HALF = {"T": "fp16", "X": "fp16", "OUT": "fp16", "C": "u8"}
PARTS = {**HALF, "X": "fp32"}
Request = tuple[str, Kernel]  # form, kernel


def requests(sm: int) -> Iterator[Request]:
    """Every kernel that the SM has, in the forms that matter for speed."""
    found = [*_shaped_requests(sm)]
    yield from found
    known, forms = {kernel.name for _, kernel in found}, dict[str, int]()
    for kernel in compile_all.requests():
        if kernel.name not in known and SIGNATURES[kernel.name].sm in (None, sm):
            forms[kernel.name] = forms.get(kernel.name, 0) + 1
            yield f"small, {forms[kernel.name]}", kernel


def _shaped_requests(sm: int) -> Iterator[Request]:
    yield from _row_requests()
    for block_tokens in (USUAL_BLOCK, LONG_BLOCK):
        for pool, kind in zip(POOLS, range(len(POOLS)), strict=True):
            for dim, group in ((64, 4), (128, 4), (256, 2)):
                sizes = HeadSizes(group * KV_HEADS, KV_HEADS, dim)
                yield from _pool_requests(pool, kind, sizes, sm, block_tokens)
    for rows in (1, FEW_ROWS, 4096):
        for bits in (4, 8):
            yield _packed_request(rows, bits, sm)
        yield from _matmul_requests(rows, sm)
        yield from _grouped_requests(rows)
    yield from _expert_requests()


def _row_requests() -> Iterator[Request]:
    row: dict[str, Constant] = {"COLUMNS": HIDDEN, "BLOCK": HIDDEN}
    block: dict[str, Constant] = {"COLUMNS": FFN, "BLOCK": 1024}
    norm: dict[str, Constant] = {**row, "HAS_INNER": False, "HAS_RESIDUAL": True, "HAS_OUTER": True}
    yield "residual, 6 parts", make_kernel("rms_norm", PARTS, {**norm, "PARTS": 6}, num_warps=8)
    yield "both norms", make_kernel("rms_norm", HALF, {**norm, "HAS_INNER": True, "PARTS": 1}, num_warps=8)
    yield "SiLU", make_kernel("gated_activation", HALF, {**block, "PARTS": 1, "KIND": 0})
    yield "", make_kernel("gather_rows", HALF, {"COLUMNS": HIDDEN, "BLOCK": 1024})
    for codes, kind in ((FLOAT8, 1), ("i8", 2)):
        form: dict[str, Constant] = {**row, "KIND": kind, "IS_STATIC": False, "SCALES_BACK": False}
        yield codes, make_kernel("quantize_rows", {**HALF, "C": codes}, form)
    spans: dict[str, Constant] = {"SPANS": HIDDEN // span_columns(4), "GROUP": 128, "GROUPS": HIDDEN // 128, "BITS": 4}
    weight: dict[str, Constant] = {**spans, "N": HIDDEN, "COLUMNS": HIDDEN, "HAS_ZERO_POINTS": True}
    yield "4 bits", make_kernel("dequantize_nbits", {**HALF, "S": "fp16"}, {**weight, "TILE": 32})
    parts = next_power_of_two(ceil_div(VOCABULARY, 4096))
    logits: dict[str, Constant] = {"VOCABULARY": VOCABULARY, "BLOCK": 4096, "PARTS": parts}
    binned: dict[str, Constant] = {**logits, "BINS": HISTOGRAM_BINS}
    drawn: dict[str, Constant] = {**binned, "CANDIDATES": MOST_CANDIDATES}
    for name, constants in (("greedy", logits), ("bin_logits", binned), ("draw", drawn)):
        yield f"{VOCABULARY} tokens", make_kernel(name, {}, constants, num_warps=SAMPLER_WARPS)


_CONTEXT = 131072


def _pool_requests(pool: str, kind: int, sizes: HeadSizes, sm: int, block_tokens: int) -> Iterator[Request]:
    dim, types = sizes.dim, {**HALF, "KV": POOLS[pool]}
    form = f"{pool} pool, head {dim}{'' if block_tokens == USUAL_BLOCK else LONG_BLOCKS}"
    vector: dict[str, Constant] = {"DIM": dim, "BLOCK_DIM": dim, "BLOCK_TOKENS": block_tokens, "KIND": kind}
    chunks: dict[str, Constant] = {
        **Chunks.of(_CONTEXT, 1, KV_HEADS).constants,
        "TILE": sizes.decode_tile("fp16", is_quantized=kind > 0),
    }
    rotary: dict[str, Constant] = {"HEADS": sizes.heads, "KV_HEADS": KV_HEADS, "HEADS_AT_ONCE": 4, "ROTARY": dim}
    aligned = frozenset({*STRIDES, "q_stride", "k_stride", "v_stride", "part_stride", "out_stride", "q_out_stride"})
    written = {**vector, **rotary, "PARTS": 6, "HAS_NORM": True}
    yield form, make_kernel("rotary_kv_write", {**PARTS, "KV": POOLS[pool]}, written, aligned)
    width = dim // 2 if pool == "int4" else dim
    read: dict[str, Constant] = {**vector, "WIDTH": width, "GROUP": sizes.group, "HAS_SOFTCAP": False, "DTYPE": "fp16"}
    decode = {**read, **chunks, "KV_HEADS": KV_HEADS, "BLOCK_GROUP": 16, "HAS_SINKS": False}
    yield form, make_kernel("decode_attention", types, decode, aligned, sizes.num_warps, decode_stages(sizes, "fp16"))
    found = {
        "ragged_attention": ragged_tile(sizes, is_quantized=kind > 0, sm=sm),
        "prefill_attention": specialized_tile(sizes, block_tokens=block_tokens, is_quantized=kind > 0, sm=sm),
    }
    for name, tile in found.items():
        if tile is not None:
            tiles: dict[str, Constant] = {"TILE": tile.keys, "TILE_QUERIES": TILE_QUERIES, "QUERIES": tile.queries}
            ragged = {**read, **tiles, "BLOCK_GROUP": tile.group, "HAS_SINKS": False}
            yield form, make_kernel(name, types, ragged, aligned, tile.num_warps, sizes.num_stages)


def _packed_request(rows: int, bits: int, sm: int) -> Request:
    shape = MatmulShape(kernel="matmul_nbits", rows=rows, n=HIDDEN, columns=HIDDEN, bits=bits, group=128)
    tile = TileTable(sm=sm).choose(shape)
    kernel, own = packed_constants(shape, tile)
    constants: dict[str, Constant] = {
        **own,
        "N": HIDDEN,
        "COLUMNS": HIDDEN,
        "SPANS": HIDDEN // span_columns(bits),
        "GROUP": 128,
        "GROUPS": HIDDEN // 128,
        "SPLITS": tile.splits,
        "TILE_ROWS": tile.rows,
        "TILE": tile.columns,
        "HAS_ZERO_POINTS": True,
        "HAS_BIAS": False,
        "HAS_SOFTCAP": False,
        "DTYPE": "fp16",
        "FOLDS": False,
    }
    if kernel == "matmul_nbits":
        constants["SCALE_WEIGHTS"] = rows > FEW_ROWS
    types, aligned = {**HALF, "S": "fp16", "OUT": "fp32"}, frozenset({"x_stride", "out_stride"})
    return f"{bits} bits, {rows} rows", make_kernel(kernel, types, constants, aligned, tile.num_warps, tile.num_stages)


def _matmul_requests(rows: int, sm: int) -> Iterator[Request]:
    forms = {"16-bit": ("fp16", "fp16"), "fp8": (FLOAT8, FLOAT8), "int8": ("i8", "i8"), "fp8 weight": ("fp16", FLOAT8)}
    for kind, (form, (x, weight)) in enumerate(forms.items()):
        bits = 16 if kind == 0 else 8
        tile = safe_tile(MatmulShape(kernel="matmul", rows=rows, n=HIDDEN, columns=HIDDEN, bits=bits), sm)
        constants: dict[str, Constant] = {
            "N": HIDDEN,
            "COLUMNS": HIDDEN,
            "SPLITS": tile.splits,
            "TILE_ROWS": tile.rows,
            "TILE": tile.columns,
            "TILE_COLUMNS": tile.depth,
            "BAND": 8,
            "KIND": kind,
            "HAS_BIAS": False,
            "HAS_SOFTCAP": False,
            "UPCAST": False,
            "FOLDS": False,
        }
        types, aligned = {**HALF, "C": x, "W": weight}, frozenset({"x_stride", "out_stride"})
        made = make_kernel("matmul", types, constants, aligned, tile.num_warps, tile.num_stages)
        yield f"{form}, {rows} rows", made


def _expert_requests() -> Iterator[Request]:
    scores: dict[str, Constant] = {"PARTS": 1, "SCORE": 0, "GROUPS": 1, "CHOSEN_GROUPS": 1}
    sizes: dict[str, Constant] = {"COUNT": EXPERTS, "BLOCK": EXPERTS, "CHOSEN": CHOSEN, "BLOCK_CHOSEN": CHOSEN}
    routed = {**sizes, **scores, "NORMALISES": True, "HAS_BIAS": False}
    yield f"{CHOSEN} of {EXPERTS}", make_kernel("route_rows", PARTS, routed, num_warps=1)
    tiles: dict[str, Constant] = {"COUNT": EXPERTS, "BINS": EXPERTS, "BLOCK": 1024, "TILE_ROWS": 64}
    yield f"{EXPERTS} experts", make_kernel("sort_by_expert", {}, tiles)
    row: dict[str, Constant] = {"COLUMNS": EXPERT_HIDDEN, "BLOCK": 1024, "CHOSEN": CHOSEN}
    yield f"{CHOSEN} experts", make_kernel("combine_experts", HALF, row)


def _grouped_requests(rows: int) -> Iterator[Request]:
    """Gates and ups of experts, with the gated activation."""
    n = 2 * EXPERT_FFN
    groups = EXPERT_HIDDEN // 128
    spans: dict[str, Constant] = {"GROUP": 128, "GROUPS": groups, "HAS_ZERO_POINTS": True, "DTYPE": "fp16"}
    for bits in (16, 8, 4):
        name: MatmulKernel = "matmul" if bits == 16 else "matmul_nbits"
        group, average = 0 if bits == 16 else 128, ceil_div(rows * CHOSEN, min(rows * CHOSEN, EXPERTS))
        shape = MatmulShape(kernel=name, rows=average, n=n, columns=EXPERT_HIDDEN, bits=bits, group=group)
        tile = grouped_tile(shape, invariant=False)
        constants: dict[str, Constant] = {
            "N": n,
            "COLUMNS": EXPERT_HIDDEN,
            "TILE_ROWS": tile.rows,
            "TILE": tile.columns,
        }
        constants |= {"CHOSEN": CHOSEN, "HAS_BIAS": False, "GATE": 0}
        kernel: str = name
        if bits == 16:
            constants |= {"TILE_COLUMNS": tile.depth, "UPCAST": False}
        else:
            kernel, own = packed_constants(shape, tile)
            constants |= {**spans, **own, "SPANS": EXPERT_HIDDEN // span_columns(bits)}
        if kernel == "matmul_nbits":
            constants["SCALE_WEIGHTS"] = tile.rows >= FEW_ROWS
        types, aligned = {**HALF, "S": "fp16"}, frozenset({"x_stride", "out_stride"})
        made = make_kernel(f"grouped_{kernel}", types, constants, aligned, tile.num_warps, tile.num_stages)
        yield f"{bits} bits, {rows} rows", made


def compiled(kernel: Kernel, sm: int) -> tuple[dict[str, object], Sass, bytes]:
    """The columns of a kernel, its instructions and its cubin that all tables of cubins share."""
    cubin = compile_kernel(kernel, sm)
    sass = disassemble(cubin.code)
    facts: dict[str, object] = {
        "kernel": kernel.name,
        "sm": sm,
        "warps": kernel.num_warps,
        "registers": sass.registers,
        "spilled_bytes": sass.spilled_bytes,
        "shared_bytes": cubin.facts.shared_bytes,
    }
    return facts, sass, cubin.code


def measured(form: str, kernel: Kernel, sm: int) -> dict[str, object]:
    """A row of the table."""
    facts, _, code = compiled(kernel, sm)
    return {"kernel": kernel.name, "form": form, **facts, "cubin_bytes": len(code)}


def main() -> None:
    """Every form for every SM that has its types."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sm", type=int, choices=SMS, nargs="+", default=list(SMS))
    rows = [
        measured(form, kernel, sm)
        for sm in parser.parse_args().sm
        for form, kernel in requests(sm)
        if sm >= FLOAT8_FROM or f"*{FLOAT8}" not in kernel.types
    ]
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
