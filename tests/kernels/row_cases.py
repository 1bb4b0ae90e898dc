"""Gathers, norms, sums and activations of rows, of odd widths."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from ingot.kernels.elementwise import ADD, MULTIPLY, combine_rows, gather_columns, map_rows
from ingot.kernels.gated_activation import (
    CLAMP,
    CLAMPED_SWIGLU,
    GELU_ERF,
    GELU_TANH,
    IDENTITY,
    RELU,
    SIGMOID,
    SILU,
    XIELU,
    gated_activation,
)
from ingot.kernels.gather import gather_quantized_rows, gather_rows
from ingot.kernels.norm import layer_norm, rms_norm
from tests.kernels.cases import HALF_STEP, NAMES, Case, power_of_two, random
from tests.kernels.packed_spans import packed_spans
from tests.kernels.reference import Float64Array, numpy64

Outcome = tuple[Float64Array, Float64Array]
LIMITS = {torch.float32: 2e-6, torch.float16: 1.01 * HALF_STEP}
NUMBERS = torch.tensor([-0.5, 0.8, 0.3, -1e-6])
"""Numbers of xIELU, the first two of which are a clip's bounds."""
FUNCTIONS: dict[str, tuple[int, Callable[[torch.Tensor], torch.Tensor]]] = {
    "SiLU": (SILU.value, torch.nn.functional.silu),
    "GeLU (erf)": (GELU_ERF.value, torch.nn.functional.gelu),
    "GeLU (tanh)": (GELU_TANH.value, partial(torch.nn.functional.gelu, approximate="tanh")),
    "identity": (IDENTITY.value, torch.clone),
    "sigmoid": (SIGMOID.value, torch.sigmoid),
    "ReLU": (RELU.value, torch.relu),
    "xIELU": (XIELU.value, lambda x: _xielu(x)),
    "clip": (CLAMP.value, lambda x: x.clamp(NUMBERS[0].item(), NUMBERS[1].item())),
}
CLAMPED_NUMBERS = torch.tensor([1.702, 7.0, 0.0, 0.0])


GATHERED = torch.tensor([4, -1, 0, 4, 2])


def _xielu(x: torch.Tensor) -> torch.Tensor:
    a, b, beta, eps = NUMBERS.double()
    made: torch.Tensor = torch.where(x > 0, a * x * x, b * (torch.expm1(torch.minimum(x, eps)) - x)) + beta * x
    return made


def normed(x: Float64Array, weight: torch.Tensor) -> Float64Array:
    """RMS norm of the last axis with epsilon 1e-5."""
    scaled: Float64Array = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-5) * numpy64(weight)
    return scaled


def gathered(x: Float64Array, indices: torch.Tensor) -> Float64Array:
    """Rows of x by index; zeros for a negative index."""
    rows: Float64Array = np.where(indices.numpy()[:, None] >= 0, x[indices.numpy()], 0.0)
    return rows


def _norm(columns: int, form: str, dtype: torch.dtype) -> Outcome:
    """form: letters of i(nner norm), r(esidual), o(uter norm), p(arts), g(athered rows)."""
    rng, parts = np.random.default_rng(0), 3 if "p" in form else 1
    x, added = random(rng, parts, 5, columns, dtype=dtype), random(rng, 5, columns, dtype=dtype)
    inner, weight = random(rng, columns, dtype=dtype), random(rng, columns, dtype=dtype)
    out, total = torch.zeros_like(added), torch.zeros_like(added)
    rms_norm[(5,)](
        *(x, added, inner, weight, out, total, GATHERED if "g" in form else None, None, None),
        *(columns, 5 * columns, columns, columns, columns, 1e-5, 1e-5, 0.0),
        COLUMNS=columns,
        BLOCK=power_of_two(columns, 16),
        PARTS=parts,
        HAS_INNER="i" in form,
        HAS_RESIDUAL="r" in form,
        HAS_OUTER="o" in form,
        GATHERS="g" in form,
    )
    h = numpy64(x).sum(axis=0)
    h = normed(h, inner) if "i" in form else h
    h = h + numpy64(added) if "r" in form else h
    h = gathered(h, GATHERED) if "g" in form else h
    if "o" not in form:
        return numpy64(total), h
    stored = numpy64(total) if "r" in form else h
    return np.stack([numpy64(out), stored]), np.stack([normed(stored, weight), h])


def _layer_norm(columns: int, form: str, dtype: torch.dtype) -> Outcome:
    """form: letters of r(esidual), b(ias), p(arts), g(athered rows)."""
    rng, parts = np.random.default_rng(0), 3 if "p" in form else 1
    x, added = random(rng, parts, 5, columns, dtype=dtype) + 1, random(rng, 5, columns, dtype=dtype)
    weight, bias = random(rng, columns, dtype=dtype), random(rng, columns, dtype=dtype)
    out, total = torch.zeros_like(added), torch.zeros_like(added)
    layer_norm[(5,)](
        *(x, added, weight, bias, out, total, GATHERED if "g" in form else None, None, None),
        *(columns, 5 * columns, columns, columns, columns, 1e-5, 0.0),
        COLUMNS=columns,
        BLOCK=power_of_two(columns, 16),
        PARTS=parts,
        HAS_RESIDUAL="r" in form,
        HAS_BIAS="b" in form,
        GATHERS="g" in form,
    )
    h = numpy64(x).sum(axis=0)
    h = h + numpy64(added) if "r" in form else h
    h = gathered(h, GATHERED) if "g" in form else h
    stored = numpy64(total) if "r" in form else h
    y = normed(stored - stored.mean(axis=-1, keepdims=True), weight) + (numpy64(bias) if "b" in form else 0)
    return np.stack([numpy64(out), stored]), np.stack([y, h])


def _gather(dtype: torch.dtype) -> Outcome:
    table, indices = random(np.random.default_rng(1), 9, 100, dtype=dtype), torch.tensor([3, -1, 8, 3])
    out = torch.full((4, 100), torch.nan)
    gather_rows[(4, 2)](indices, None, None, table, out, 100, 100, 1.5, COLUMNS=100, BLOCK=64)
    return numpy64(out), np.where(indices[:, None] >= 0, numpy64(table)[indices] * 1.5, 0.0)


def spans(codes: NDArray[np.uint8], bits: int) -> torch.Tensor:
    """As `packed_spans`, for torch."""
    return torch.from_numpy(packed_spans(codes, bits))


def _gather_quantized(bits: int, columns: int, symmetric: bool) -> Outcome:
    rng, groups, middle = np.random.default_rng(2), -(-columns // 32), 1 << (bits - 1)
    codes = rng.integers(0, 2 * middle, (9, columns), np.uint8)
    scales, zeros = random(rng, 9, groups), rng.integers(0, 2 * middle, (9, groups), np.uint8)
    if symmetric:
        zeros[:] = middle
    out, indices = torch.full((3, columns), torch.nan), torch.tensor([8, 0, -1])
    gather_quantized_rows[(3, -(-columns // 64))](
        *(indices, None, None, spans(codes, bits), scales.T.contiguous()),
        *(None if symmetric else torch.from_numpy(zeros.T.copy()), out, columns, 2.0),
        TABLE_ROWS=9,
        COLUMNS=columns,
        BLOCK=64,
        SPANS=-(-columns * bits // 512),
        GROUP=32,
        BITS=bits,
        HAS_ZERO_POINTS=not symmetric,
    )
    group = np.arange(columns) // 32
    values = (codes.astype(np.float64) - zeros[:, group]) * numpy64(scales)[:, group] * 2
    return numpy64(out), np.concatenate([values[[8, 0]], np.zeros((1, columns))])


def _interleaved(dtype: torch.dtype, parts: int) -> Outcome:
    gate_up = random(np.random.default_rng(5), parts, 3, 208, dtype=dtype) * 10
    out = torch.full((3, 104), torch.nan)
    gated_activation[(3, 2)](
        *(gate_up, gate_up, NUMBERS, out, 208, 624, 0, 208, 624, 104),
        COLUMNS=104,
        BLOCK=64,
        PARTS=parts,
        KIND=SILU.value,
        INTERLEAVED=True,
    )
    halves = gate_up.double().sum(0).reshape(3, 13, 2, 8)
    return numpy64(out), numpy64(FUNCTIONS["SiLU"][1](halves[:, :, 0]) * halves[:, :, 1]).reshape(3, 104)


def _gated(name: str, dtype: torch.dtype, parts: int) -> Outcome:
    gate_up = random(np.random.default_rng(3), parts, 3, 200, dtype=dtype) * 10
    out, (kind, function) = torch.full((3, 100), torch.nan), FUNCTIONS[name]
    gated_activation[(3, 2)](
        *(gate_up, gate_up, NUMBERS, out, 200, 600, 100, 200, 600, 100),
        COLUMNS=100,
        BLOCK=64,
        PARTS=parts,
        KIND=kind,
    )
    whole = gate_up.double().sum(0)
    return numpy64(out), numpy64(function(whole[:, :100]) * whole[:, 100:])


def _clamped() -> Outcome:
    gate_up = random(np.random.default_rng(3), 3, 200) * 6
    out = torch.full((3, 100), torch.nan)
    gated_activation[(3, 2)](
        *(gate_up, gate_up, CLAMPED_NUMBERS, out, 200, 0, 100, 200, 0, 100),
        COLUMNS=100,
        BLOCK=64,
        PARTS=1,
        KIND=CLAMPED_SWIGLU,
    )
    gate, up = gate_up.double()[:, :100], gate_up.double()[:, 100:]
    g, u = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return numpy64(out), numpy64((u + 1) * g * torch.sigmoid(g * CLAMPED_NUMBERS[0].double()))


def _mapped(name: str, softcap: float, parts: int) -> Outcome:
    x = random(np.random.default_rng(4), parts, 3, 110) * 5
    out, (kind, function) = torch.full((3, 100), torch.nan), FUNCTIONS[name]
    map_rows[(3, 2)](
        *(x, NUMBERS, out, 7, 110, 330, 100, 0.5, softcap),
        COLUMNS=100,
        BLOCK=64,
        PARTS=parts,
        KIND=kind,
        HAS_SOFTCAP=softcap > 0,
    )
    whole = numpy64(function(x.double().sum(0)[:, 7:107] * 0.5))
    return numpy64(out), softcap * np.tanh(whole / softcap) if softcap else whole


def _combined(kind: int, right_stride: int, dtype: torch.dtype) -> Outcome:
    rng = np.random.default_rng(8)
    left, right = random(rng, 3, 100, dtype=dtype), random(rng, 3, 100, dtype=dtype)
    out = torch.full((3, 100), torch.nan)
    combine_rows[(3, 2)](left, right, out, 100, 0, right_stride, 100, COLUMNS=100, BLOCK=64, PARTS=1, KIND=kind)
    one, other = numpy64(left), numpy64(right) if right_stride else numpy64(right)[:1]
    return numpy64(out), one + other if kind == ADD.value else one * other


def _columns() -> Outcome:
    x, columns = random(np.random.default_rng(9), 3, 100), torch.tensor([99, 4, 50, 4, 0])
    out = torch.full((3, 5), torch.nan)
    gather_columns[(3, 1)](x, columns, out, 100, 5, COLUMNS=5, BLOCK=16)
    return numpy64(out), numpy64(x)[:, columns]


def cases() -> Iterator[Case]:
    """Widths, forms and precisions of every kernel over rows."""
    for columns in (1, 64, 172, 1000):
        yield _norm_case(columns, "o", torch.float32)
    for form in ("ro", "po", "iro", "ir", "pro", "igpro"):
        yield _norm_case(172, form, torch.float32)
    yield _norm_case(172, "ro", torch.float16)
    for columns, form in ((64, "b"), (172, "rb"), (172, "r"), (1000, "prb"), (172, "gpr")):
        yield _layer_norm_case(columns, form, torch.float32)
    yield _layer_norm_case(172, "rb", torch.float16)
    for dtype in LIMITS:
        yield Case("gather_rows", "100 columns, padding", NAMES[dtype], 1e-7, partial(_gather, dtype))
    for bits, columns, symmetric in ((8, 100, True), (8, 64, False), (4, 100, False), (4, 172, True)):
        shape = f"{columns} columns, blocks of 32, {'' if symmetric else 'a'}symmetric"
        run = partial(_gather_quantized, bits, columns, symmetric)
        yield Case("gather_quantized_rows", shape, f"{bits} bits, float32", 1e-7, run)
    for name in FUNCTIONS:
        limit, run = LIMITS[torch.float32], partial(_gated, name, torch.float32, 1)
        yield Case("gated_activation", f"{name}, 100 columns", "float32", limit, run)
    yield Case("gated_activation", "clamped SwiGLU, 100 columns", "float32", LIMITS[torch.float32], _clamped)
    for dtype, parts in ((torch.float16, 1), (torch.float32, 4)):
        shape = "SiLU, 100 columns" + (f", {parts} parts" if parts > 1 else "")
        yield Case("gated_activation", shape, NAMES[dtype], LIMITS[dtype], partial(_gated, "SiLU", dtype, parts))
        run = partial(_interleaved, dtype, parts)
        yield Case("gated_activation", f"{shape}, interleaved", NAMES[dtype], LIMITS[dtype], run)
    for name, cap, parts in (("identity", 2.0, 1), ("SiLU", 0.0, 3), ("identity", 0.0, 2), ("xIELU", 0.0, 1)):
        shape = f"{name}, softcap {cap:g}, {parts} parts"
        yield Case("map_rows", shape, "float32", LIMITS[torch.float32], partial(_mapped, name, cap, parts))
    for kind, word in ((ADD.value, "sum"), (MULTIPLY.value, "multiply")):
        for stride in (0, 100):
            run = partial(_combined, kind, stride, torch.float16)
            yield Case("combine_rows", f"{word}, {'rows' if stride else 'a vector'}", "float16", 1e-7, run)
    yield Case("gather_columns", "5 of 100 columns", "float32", 0.0, _columns)


def _layer_norm_case(columns: int, form: str, dtype: torch.dtype) -> Case:
    words = {"p": "parts", "r": "residual", "b": "bias", "g": "gathered"}
    shape = ", ".join([f"{columns} columns", *(words[letter] for letter in "prbg" if letter in form)])
    return Case("layer_norm", shape, NAMES[dtype], LIMITS[dtype], partial(_layer_norm, columns, form, dtype))


def _norm_case(columns: int, form: str, dtype: torch.dtype) -> Case:
    words = {"p": "parts", "i": "inner norm", "r": "residual", "o": "norm", "g": "gathered"}
    shape = ", ".join([f"{columns} columns", *(words[letter] for letter in "pirog" if letter in form)])
    return Case("rms_norm", shape, NAMES[dtype], LIMITS[dtype], partial(_norm, columns, form, dtype))
