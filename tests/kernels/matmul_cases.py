"""Matmuls: odd shapes, every form of weight, split-K partials, and rows quantized to 8 bits."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from ingot.kernels import matmul_int4, matmul_int4_wide
from ingot.kernels.matmul import FP8_WEIGHT, matmul
from ingot.kernels.matmul_nbits import matmul_nbits
from ingot.kernels.norm import quantize_rows
from tests.kernels.cases import DOT_TYPES, HALF_STEP, NAMES, Case, power_of_two, random
from tests.kernels.reference import FLOAT, FP8, INT8, Float64Array, numpy64
from tests.kernels.row_cases import FUNCTIONS, spans
from tests.simulators import gluon_emulator

gluon_emulator.install(matmul_int4)
gluon_emulator.install(matmul_int4_wide)
_PACKED = {
    "matmul_nbits": matmul_nbits,
    "matmul_int4": matmul_int4.matmul_int4,
    "matmul_int4_wide": matmul_int4_wide.matmul_int4_wide,
}
Outcome = tuple[Float64Array, Float64Array]
LIMITS = {torch.float32: 3e-6, torch.float16: 3 * HALF_STEP}
FORMS = {FLOAT: "floats", FP8: "fp8 both", INT8: "int8 both", FP8_WEIGHT.value: "fp8 weight"}
NBITS = [  # bits, rows, n, columns, group, splits, symmetric, scaled weights
    (4, 1, 48, 256, 128, 1, True, False),
    (4, 1, 40, 320, 64, 3, False, False),
    (4, 5, 33, 172, 32, 1, False, False),
    (4, 17, 48, 192, 32, 2, True, True),
    (4, 5, 33, 192, 96, 1, False, True),
    (8, 3, 40, 172, 32, 2, True, False),
    (8, 1, 33, 128, 128, 1, False, True),
]
WIDE = [  # rows, n, columns, group, splits, symmetric
    (9, 300, 520, 128, 1, False),
    (70, 96, 384, 128, 3, True),
    (33, 512, 300, 384, 1, False),
]
RING = [  # rows, n, columns, group, splits, symmetric, folded, scales in float32, gate
    (1, 96, 1024, 128, 1, False, False, False, None),
    (9, 80, 1000, 32, 2, False, False, False, None),
    (17, 48, 900, 64, 3, True, True, False, None),
    (5, 112, 700, 128, 2, True, False, True, None),
    (3, 80, 640, 64, 1, False, False, True, "SiLU"),
    (2, 16, 1152, 96, 4, False, True, True, None),
]
SHAPES = [(1, 40, 100, 1), (33, 70, 64, 1), (5, 17, 172, 3)]  # rows, n, columns, splits


def capped(x: Float64Array, softcap: float) -> Float64Array:
    """Apply a softcap; 0 is none."""
    return softcap * np.tanh(x / softcap) if softcap else x


def _nbits(
    bits: int,
    rows: int,
    n: int,
    columns: int,
    group: int,
    splits: int,
    symmetric: bool,
    scaled: bool,
    dtype: torch.dtype,
    *,
    kernel: str = "matmul_nbits",
    gate: str | None = None,
    ahead: int = 0,
    folds: bool = False,
    scale_type: type[np.floating[Any]] = np.float16,
) -> Outcome:
    rng, levels = np.random.default_rng(rows), 1 << bits
    count, groups = -(-columns * bits // 512), -(-columns // group)
    codes, zeros = rng.integers(0, levels, (n, columns), np.uint8), rng.integers(0, levels, (n, groups), np.uint8)
    scales = rng.uniform(0.01, 0.1, (n, groups)).astype(scale_type)
    if symmetric:
        zeros[:] = levels // 2
    x, bias = random(rng, rows, columns, dtype=dtype), random(rng, n, dtype=dtype)
    group_of, softcap = np.arange(columns) // group, 0.0 if splits > 1 or gate else 8.0
    weight = (codes.astype(np.float64) - zeros[:, group_of]) * scales.astype(np.float64)[:, group_of]
    width = n // 2 if gate else n
    programs = 1 if folds else splits
    out = torch.full((programs, rows, width), torch.nan)
    at_once = 2 if bits == 8 and group % 128 == 0 and count % 2 == 0 else 1
    own: dict[str, object] = {"BITS": bits, "SPANS_AT_ONCE": at_once, "SCALE_WEIGHTS": scaled}
    tile_rows, tile = 16, 64
    if kernel == "matmul_int4":
        own = {"AHEAD": ahead or 1 + splits % 2, "WARPS": 4}
    elif kernel == "matmul_int4_wide":
        tile_rows, tile, own = 16 if rows <= 16 else 64, 256, {"STAGES": 4}
    _PACKED[kernel][(-(-rows // tile_rows), -(-n // tile), programs)](
        *(x, spans(codes, bits), torch.from_numpy(scales.T.copy())),
        *(None if symmetric else torch.from_numpy(zeros.T.copy()), bias, out, rows, columns, width, 0.5, softcap),
        N=n,
        COLUMNS=columns,
        SPANS=count,
        GROUP=group,
        GROUPS=groups,
        SPLITS=splits,
        TILE_ROWS=tile_rows,
        TILE=tile,
        HAS_ZERO_POINTS=not symmetric,
        HAS_BIAS=True,
        HAS_SOFTCAP=softcap > 0,
        DTYPE=DOT_TYPES[dtype],
        FOLDS=folds,
        **own,
        **gate_constants(gate),
    )
    result = numpy64(x) @ weight.T * 0.5 + numpy64(bias)
    return numpy64(out.sum(0)), gated(result, gate) if gate else capped(result, softcap)


def gate_constants(gate: str | None) -> dict[str, int]:
    """Constants of a matmul that computes a gated activation."""
    return {"GATE": FUNCTIONS[gate][0]} if gate else {}


def gated(result: Float64Array, gate: str) -> Float64Array:
    """The gated activation of interleaved gates and ups [rows, n]: [rows, n / 2]."""
    halves = torch.from_numpy(result).reshape(len(result), -1, 2, 8)
    return numpy64(FUNCTIONS[gate][1](halves[:, :, 0]) * halves[:, :, 1]).reshape(len(result), -1)


def _matmul(
    form: int, rows: int, n: int, columns: int, splits: int, dtype: torch.dtype, gate: str | None = None
) -> Outcome:
    rng = np.random.default_rng(form)
    x, w = random(rng, rows, columns, dtype=dtype), random(rng, n, columns, dtype=dtype)
    bias, softcap, width = random(rng, n, dtype=dtype), 0.0 if splits > 1 or gate else 30.0, n // 2 if gate else n
    left, left_scale = quantized(x, FLOAT if form == FP8_WEIGHT.value else form)
    right, right_scale = quantized(w, FP8 if form == FP8_WEIGHT.value else form)
    exact = [numpy64(codes) * numpy64(scale)[:, None] for codes, scale in ((left, left_scale), (right, right_scale))]
    out = torch.full((splits, rows, width), torch.nan)
    matmul[(-(-n // 32) * -(-rows // 32), splits)](
        *(left, right, left_scale, right_scale, bias, out, rows, columns, width, 0.5, softcap),
        N=n,
        COLUMNS=columns,
        SPLITS=splits,
        TILE_ROWS=32,
        TILE=32,
        TILE_COLUMNS=32,
        BAND=2,
        KIND=form,
        HAS_BIAS=True,
        HAS_SOFTCAP=softcap > 0,
        UPCAST=True,
        FOLDS=False,
        **gate_constants(gate),
    )
    result = exact[0] @ exact[1].T * 0.5 + numpy64(bias)
    return numpy64(out.sum(0)), gated(result, gate) if gate else capped(result, softcap)


def quantized(x: torch.Tensor, kind: int, scale: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize rows with the kernel: codes and scales; for FLOAT the rows and ones."""
    if kind == FLOAT:
        return x, torch.ones(len(x))
    codes = torch.zeros(x.shape, dtype=torch.float8_e4m3fn if kind == FP8 else torch.int8)
    scales, columns = torch.zeros(len(x)), x.shape[1]
    form = {"KIND": kind, "IS_STATIC": scale is not None, "SCALES_BACK": False}
    arguments = (x, codes, scales, columns, scale or 0.0)
    quantize_rows[(len(x),)](*arguments, COLUMNS=columns, BLOCK=power_of_two(columns), **form)
    return codes, scales


def scaled_back(x: torch.Tensor, kind: int, scale: float) -> torch.Tensor:
    """Round rows by a static scale, as floats."""
    out, columns = torch.zeros_like(x), x.shape[1]
    form = {"KIND": kind, "IS_STATIC": True, "SCALES_BACK": True}
    quantize_rows[(len(x),)](x, out, None, columns, scale, COLUMNS=columns, BLOCK=power_of_two(columns), **form)
    return out


def _codes(kind: int, static: float | None) -> Outcome:
    """The kernel's codes against x over its scale, rounded; rows of very different magnitude, and one of zeros."""
    rng = np.random.default_rng(4)
    x = torch.from_numpy((rng.standard_normal((6, 100)) * np.logspace(-6, 3, 6)[:, None]).astype(np.float32))
    x[2] = 0
    codes, scales = quantized(x, kind, static)
    shares = (x / scales[:, None]).clamp(*((-448, 448) if kind == FP8 else (-128, 127)))
    nearest = shares.to(torch.float8_e4m3fn) if kind == FP8 else torch.round(shares)
    return numpy64(codes), numpy64(nearest)


def cases() -> Iterator[Case]:
    """Every form of weight over its shapes."""
    for bits, rows, n, columns, group, splits, symmetric, scaled in NBITS:
        shape = f"{rows} rows, {columns} to {n}, blocks of {group}"
        shape += f", {'' if symmetric else 'a'}symmetric" + (f", {splits} parts" if splits > 1 else "")
        dtypes = [torch.float32, torch.float16] if (bits, rows) in ((4, 1), (4, 17), (8, 3)) else [torch.float32]
        for dtype in dtypes:
            run = partial(_nbits, bits, rows, n, columns, group, splits, symmetric, scaled, dtype)
            yield Case("matmul_nbits", shape, f"{bits} bits, {NAMES[dtype]}", LIMITS[dtype], run)
        if bits == 4:
            sizes = (bits, rows, n, columns, group, splits, symmetric, scaled)
            run = partial(_nbits, *sizes, torch.float16, kernel="matmul_int4")
            yield Case("matmul_int4", shape, "float16", LIMITS[torch.float32], run)
    for rows, n, columns, group, splits, symmetric in WIDE:
        shape = f"{rows} rows, {columns} to {n}, blocks of {group}, {splits} parts"
        sizes = (4, rows, n, columns, group, splits, symmetric, False)
        run = partial(_nbits, *sizes, torch.float16, kernel="matmul_int4_wide")
        yield Case("matmul_int4_wide", shape, "float16", LIMITS[torch.float32], run)
    yield from _ring_cases()
    for form, word in FORMS.items():
        for rows, n, columns, splits in SHAPES:
            shape = f"{rows} rows, {columns} to {n}" + (f", {splits} parts" if splits > 1 else "")
            dtype = torch.float16 if rows == 33 else torch.float32
            run = partial(_matmul, form, rows, n, columns, splits, dtype)
            yield Case("matmul", shape, f"{word}, {NAMES[dtype]}", LIMITS[torch.float32], run)
    yield from _gated_cases()
    for kind, word in ((FP8, "fp8"), (INT8, "int8")):
        for static in (None, 0.02):
            shape = "100 columns, " + ("a scale by row" if static is None else "one scale")
            yield Case("quantize_rows", shape, f"{word} codes", 0.0, partial(_codes, kind, static))


def _ring_cases() -> Iterator[Case]:
    """4-bit matmuls whose codes are copied three spans before their use."""
    for rows, n, columns, group, splits, symmetric, folds, is_float32, gate in RING:
        shape = f"{rows} rows, {columns} to {n}, blocks of {group}, {splits} {'folded ' if folds else ''}parts"
        shape += ", 3 spans ahead" + (f", gated by {gate}" if gate else "")
        sizes = (4, rows, n, columns, group, splits, symmetric, False)
        run = partial(
            _nbits,
            *sizes,
            torch.float16,
            kernel="matmul_int4",
            gate=gate,
            ahead=3,
            folds=folds,
            scale_type=np.float32 if is_float32 else np.float16,
        )
        yield Case("matmul_int4", shape, "float16", LIMITS[torch.float16 if gate else torch.float32], run)


def _gated_cases() -> Iterator[Case]:
    """Matmuls that compute a gated activation: every kernel, tiles that reach over the last column."""
    for gate, bits, kernel in (
        ("SiLU", 4, "matmul_int4"),
        ("GeLU (tanh)", 4, "matmul_int4"),
        ("SiLU", 4, "matmul_int4_wide"),
        ("SiLU", 4, "matmul_nbits"),
        ("SiLU", 8, "matmul_nbits"),
    ):
        sizes = (bits, 5, 80, 172, 128 if kernel == "matmul_int4_wide" else 32, 1, bits == 8, False)
        run = partial(_nbits, *sizes, torch.float16, kernel=kernel, gate=gate)
        precision = f"{bits} bits, float16" if kernel == "matmul_nbits" else "float16"
        yield Case(kernel, f"5 rows, 172 to 40 gated by {gate}", precision, LIMITS[torch.float16], run)
    for form, gate in zip(FORMS, ("SiLU", "GeLU (erf)", "ReLU", "identity"), strict=True):
        run = partial(_matmul, form, 33, 80, 172, 1, torch.float32, gate)
        shape = f"33 rows, 172 to 40 gated by {gate}"
        yield Case("matmul", shape, f"{FORMS[form]}, float32", 2 * LIMITS[torch.float32], run)
