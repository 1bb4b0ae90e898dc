"""Random problems of every kernel that packed_cases.py and the attention's properties leave out, against float64.

Rows are further apart than they are long. NaN is in all that a kernel must not read, and in all results beforehand:
what it must not write is NaN afterwards.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ingot.kernels.carry_tokens import carry_tokens
from ingot.kernels.elementwise import ADD, MULTIPLY, combine_rows, gather_columns, map_rows
from ingot.kernels.gated_activation import gated_activation
from ingot.kernels.gather import gather_rows
from ingot.kernels.matmul import FP8_WEIGHT, matmul
from ingot.kernels.norm import layer_norm, quantize_rows, rms_norm
from ingot.kernels.rotary_kv_write import rotary_kv_write, rotate_heads
from ingot.kernels.sampling import greedy
from ingot.sizes import next_power_of_two
from tests.kernels import expert_cases, fixed_split_cases, latent_cases, low_rank_cases, recurrence_cases
from tests.kernels.attention_cases import LIMITS
from tests.kernels.cases import HALF_STEP, power_of_two, random
from tests.kernels.matmul_cases import capped, quantized
from tests.kernels.reference import FLOAT, FP8, INT8, STEPS, Float64Array, Pool, attend, numpy64, rope
from tests.kernels.row_cases import FUNCTIONS, NUMBERS, gathered, normed

Outcome = tuple[Float64Array, Float64Array, float]  # found, expected, and the largest error over the largest value
Rng = np.random.Generator
_LEAST = 2.0**-13  # of the largest value: float16 has fewer bits below
_ROW_LIMITS = {torch.float32: 4e-6, torch.float16: 1.01 * HALF_STEP}


def dtype_of(rng: Rng) -> torch.dtype:
    return [torch.float32, torch.float16][rng.integers(2)]


def strided(rng: Rng, *shape: int, dtype: torch.dtype = torch.float32, filled: bool = True) -> torch.Tensor:
    """Numbers [..., columns] whose rows are up to 30 elements further apart; NaN in between, and where not filled."""
    memory = torch.full((*shape[:-1], shape[-1] + int(rng.integers(30))), torch.nan, dtype=dtype)
    if filled:
        memory[..., : shape[-1]] = random(rng, *shape, dtype=dtype)
    return memory[..., : shape[-1]]


def written(out: torch.Tensor) -> Float64Array:
    """The result; infinite where something between its rows was written."""
    whole = torch.as_strided(out, (*out.shape[:-1], out.stride(-2)), out.stride(), out.storage_offset())
    return numpy64(out) if whole[..., out.shape[-1] :].isnan().all() else np.full(out.shape, np.inf)


def _indices(rng: Rng, rows: int) -> torch.Tensor | None:
    """For half of the problems, the rows that are gathered."""
    return torch.from_numpy(rng.integers(-1, rows, rows)) if rng.integers(2) else None


@dataclass(frozen=True)
class _Codes:
    """Codes that a norm makes of its result in two thirds of the problems."""

    kind: int
    static: float
    codes: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def random(cls, rng: Rng, rows: int, columns: int) -> "_Codes":
        kind, static = [FLOAT, INT8, FP8][rng.integers(3)], float(rng.choice([0.0, 0.02]))
        dtype = torch.float8_e4m3fn if kind == FP8 else torch.int8
        return cls(kind, static, torch.zeros(rows, columns, dtype=dtype), torch.full((rows,), torch.nan))

    @property
    def constants(self) -> dict[str, object]:
        return {"KIND": self.kind, "IS_STATIC": self.static > 0, "STORES": True}

    def faults(self, out: torch.Tensor) -> Float64Array:
        """Infinite where a code is not the nearest to the stored result over the row's scale, or that is wrong."""
        if self.kind == FLOAT:
            return np.zeros(out.shape)
        wanted, off = _nearest(out, self.scales, self.kind, self.static)
        return np.where((numpy64(self.codes) != numpy64(wanted)) | off[:, None], np.inf, 0.0)


def _nearest(x: torch.Tensor, scales: torch.Tensor, kind: int, static: float) -> tuple[torch.Tensor, NDArray[np.bool_]]:
    """The codes of rows by their scales, and which scales are wrong."""
    most = 448.0 if kind == FP8 else 127.0
    shares = (x.float() / scales[:, None]).clamp(-most if kind == FP8 else -128, most)
    largest = np.maximum(np.abs(numpy64(x)).max(axis=1), 1e-30) / most
    wanted = np.full(len(x), static) if static else largest
    return shares.to(torch.float8_e4m3fn) if kind == FP8 else shares.round(), np.abs(
        numpy64(scales) / wanted - 1
    ) > 2e-7


def _norm(rng: Rng) -> Outcome:
    rows, columns, parts, dtype = (
        int(rng.integers(1, 9)),
        int(rng.integers(1, 700)),
        int(rng.integers(1, 5)),
        dtype_of(rng),
    )
    inner, has_residual = bool(rng.integers(2)), bool(rng.integers(2))
    has_outer = not has_residual or bool(rng.integers(2))
    x = strided(rng, parts, rows, columns, dtype=torch.float32 if parts > 1 else dtype)
    residual, weights = strided(rng, rows, columns, dtype=dtype), random(rng, 2, columns, dtype=dtype)
    out, total = (strided(rng, rows, columns, dtype=dtype, filled=False) for _ in range(2))
    indices, codes = _indices(rng, rows), _Codes.random(rng, rows, columns)
    rms_norm[(rows,)](
        *(x, residual, weights[0], weights[1], out, total, indices, codes.codes, codes.scales),
        *(x.stride(1), x.stride(0), residual.stride(0), total.stride(0), out.stride(0), 1e-5, 1e-5, codes.static),
        COLUMNS=columns,
        BLOCK=power_of_two(columns, 16),
        PARTS=parts,
        HAS_INNER=inner,
        HAS_RESIDUAL=has_residual,
        HAS_OUTER=has_outer,
        GATHERS=indices is not None,
        **codes.constants,
    )
    h = numpy64(x).sum(axis=0)
    h = normed(h, weights[0]) if inner else h
    h = h + numpy64(residual) if has_residual else h
    h = h if indices is None else gathered(h, indices)
    found, wanted = [], []
    if has_residual:
        found, wanted, h = [written(total)], [h], numpy64(total)
    if has_outer:
        found, wanted = [*found, written(out) + codes.faults(out)], [*wanted, normed(h, weights[1])]
    return np.stack(found), np.stack(wanted), _ROW_LIMITS[dtype]


def _layer_norm(rng: Rng) -> Outcome:
    rows, columns, parts = (int(rng.integers(1, most)) for most in (9, 700, 5))
    dtype, has_residual, has_bias = dtype_of(rng), bool(rng.integers(2)), bool(rng.integers(2))
    x = strided(rng, parts, rows, columns, dtype=torch.float32 if parts > 1 else dtype)
    residual, vectors = strided(rng, rows, columns, dtype=dtype), random(rng, 2, columns, dtype=dtype)
    out, total = (strided(rng, rows, columns, dtype=dtype, filled=False) for _ in range(2))
    indices, codes = _indices(rng, rows), _Codes.random(rng, rows, columns)
    layer_norm[(rows,)](
        *(x, residual, vectors[0], vectors[1], out, total, indices, codes.codes, codes.scales),
        *(x.stride(1), x.stride(0), residual.stride(0), total.stride(0), out.stride(0), 1e-5, codes.static),
        COLUMNS=columns,
        BLOCK=power_of_two(columns, 16),
        PARTS=parts,
        HAS_RESIDUAL=has_residual,
        HAS_BIAS=has_bias,
        GATHERS=indices is not None,
        **codes.constants,
    )
    h = numpy64(x).sum(axis=0)
    h = h + numpy64(residual) if has_residual else h
    h = h if indices is None else gathered(h, indices)
    found, wanted = [], []
    if has_residual:
        found, wanted, h = [written(total)], [h], numpy64(total)
    y = normed(h - h.mean(axis=-1, keepdims=True), vectors[0]) + (numpy64(vectors[1]) if has_bias else 0)
    return np.stack([*found, written(out) + codes.faults(out)]), np.stack([*wanted, y]), _ROW_LIMITS[dtype]


def _gather(rng: Rng) -> Outcome:
    columns, dtype = int(rng.integers(1, 300)), dtype_of(rng)
    table, indices = strided(rng, 9, columns, dtype=dtype), rng.integers(-1, 9, 6)
    tokens, carried = rng.integers(-1, 9, 4), np.where(rng.random(6) < 0.5, rng.integers(0, 4, 6), -1).astype(np.int32)
    carries = bool(rng.integers(2))
    out, alpha = strided(rng, 6, columns, filled=False), float(rng.uniform(0.5, 2))
    strides = (table.stride(0), out.stride(0))
    gather_rows[(6, -(-columns // 64))](
        *(torch.from_numpy(indices), torch.from_numpy(carried), torch.from_numpy(tokens)),
        *(table, out, *strides, alpha),
        COLUMNS=columns,
        BLOCK=64,
        CARRIES=carries,
    )
    if carries:
        indices = np.where(carried >= 0, np.maximum(tokens[carried], 0), indices)
    return written(out), np.where(indices[:, None] >= 0, numpy64(table)[indices] * alpha, 0.0), 1e-7


def _activation(rng: Rng) -> tuple[int, Callable[[torch.Tensor], torch.Tensor]]:
    return list(FUNCTIONS.values())[rng.integers(len(FUNCTIONS))]


def _gated(rng: Rng) -> Outcome:
    rows, columns, parts, dtype = (
        int(rng.integers(1, 6)),
        int(rng.integers(1, 300)),
        int(rng.integers(1, 5)),
        dtype_of(rng),
    )
    kind, function = _activation(rng)
    both = strided(rng, parts, rows, 2 * columns, dtype=torch.float32 if parts > 1 else dtype)
    out, strides = strided(rng, rows, columns, filled=False), (both.stride(1), both.stride(0))
    gated_activation[(rows, -(-columns // 64))](
        *(both, both, NUMBERS, out, *strides, columns, *strides, out.stride(0)),
        COLUMNS=columns,
        BLOCK=64,
        PARTS=parts,
        KIND=kind,
    )
    whole = both.double().sum(0)
    return written(out), numpy64(function(whole[:, :columns]) * whole[:, columns:]), 4e-6


def _mapped(rng: Rng) -> Outcome:
    rows, columns, parts, skipped = (int(rng.integers(1, most)) for most in (6, 300, 5, 9))
    softcap, alpha, (kind, function) = float(rng.choice([0.0, 3.0])), float(rng.uniform(0.2, 2)), _activation(rng)
    x, out = strided(rng, parts, rows, skipped + columns), strided(rng, rows, columns, filled=False)
    map_rows[(rows, -(-columns // 64))](
        *(x, NUMBERS, out, skipped, x.stride(1), x.stride(0), out.stride(0), alpha, softcap),
        COLUMNS=columns,
        BLOCK=64,
        PARTS=parts,
        KIND=kind,
        HAS_SOFTCAP=softcap > 0,
    )
    return written(out), capped(numpy64(function(x.double().sum(0)[:, skipped:] * alpha)), softcap), 4e-6


def _combined(rng: Rng) -> Outcome:
    rows, columns, parts, dtype = (
        int(rng.integers(1, 6)),
        int(rng.integers(1, 300)),
        int(rng.integers(1, 4)),
        dtype_of(rng),
    )
    kind, is_vector = [ADD.value, MULTIPLY.value][rng.integers(2)], bool(rng.integers(2))
    left = strided(rng, parts, rows, columns)
    right = strided(rng, 1 if is_vector else rows, columns, dtype=dtype)
    out = strided(rng, rows, columns, filled=False)
    combine_rows[(rows, -(-columns // 64))](
        *(left, right, out, left.stride(1), left.stride(0), 0 if is_vector else right.stride(0), out.stride(0)),
        COLUMNS=columns,
        BLOCK=64,
        PARTS=parts,
        KIND=kind,
    )
    one, other = numpy64(left).sum(0), numpy64(right)
    return written(out), one + other if kind == ADD.value else one * other, 1e-6


def _columns(rng: Rng) -> Outcome:
    x, count = strided(rng, 4, int(rng.integers(1, 200)), dtype=dtype_of(rng)), int(rng.integers(1, 70))
    columns, out = rng.integers(0, x.shape[1], count), strided(rng, 4, count, filled=False)
    strides = x.stride(0), out.stride(0)
    gather_columns[(4, -(-count // 16))](x, torch.from_numpy(columns), out, *strides, COLUMNS=count, BLOCK=16)
    return written(out), numpy64(x)[:, columns], 0.0


def _matmul(rng: Rng) -> Outcome:
    form = [FLOAT, FP8, INT8, FP8_WEIGHT.value][rng.integers(4)]
    rows, n, columns = (int(rng.integers(1, most)) for most in (70, 100, 400))
    left, left_scale = quantized(random(rng, rows, columns), FLOAT if form == FP8_WEIGHT.value else form)
    right, right_scale = quantized(random(rng, n, columns), FP8 if form == FP8_WEIGHT.value else form)
    memory = torch.zeros(rows, columns + int(rng.integers(30)), dtype=left.dtype)
    memory[:, :columns] = left
    if form in (FLOAT, FP8_WEIGHT.value):
        memory[:, columns:] = torch.nan
    splits, folds, bias = int(rng.integers(1, -(-columns // 32) + 1)), bool(rng.integers(2)), random(rng, n)
    alpha, softcap = (1.0, 0.0) if splits > 1 else (0.5, float(rng.choice([0.0, 20.0])))
    programs, tile_rows, tile = 1 if folds and rng.integers(2) else splits, *map(int, rng.choice([16, 32], 2))
    out = torch.full((programs, rows, n), torch.nan)
    matmul[(-(-n // tile) * -(-rows // tile_rows), programs)](
        *(memory, right, left_scale, right_scale, bias, out, rows, memory.stride(0), n, alpha, softcap),
        N=n,
        COLUMNS=columns,
        SPLITS=splits,
        TILE_ROWS=tile_rows,
        TILE=tile,
        TILE_COLUMNS=32,
        BAND=int(rng.integers(1, 4)),
        KIND=form,
        HAS_BIAS=True,
        HAS_SOFTCAP=softcap > 0,
        UPCAST=True,
        FOLDS=folds,
    )
    exact = [numpy64(codes) * numpy64(scale)[:, None] for codes, scale in ((left, left_scale), (right, right_scale))]
    return numpy64(out.sum(0)), capped(exact[0] @ exact[1].T * alpha + numpy64(bias), softcap), 4e-6


def _codes(rng: Rng) -> Outcome:
    """Codes by the kernel's own scale, and that scale over the row's largest value."""
    rows, columns, kind = int(rng.integers(1, 8)), int(rng.integers(1, 500)), [FP8, INT8][rng.integers(2)]
    static = float(rng.choice([0.0, 0.02]))
    x = strided(rng, rows, columns)
    x *= torch.from_numpy(np.logspace(-5, 2, rows, dtype=np.float32))[:, None]
    dtype = torch.float8_e4m3fn if kind == FP8 else torch.int8
    codes, scales = torch.zeros(rows, columns, dtype=dtype), torch.full((rows,), torch.nan)
    form = {"KIND": kind, "IS_STATIC": static > 0, "SCALES_BACK": False}
    block = power_of_two(columns)
    quantize_rows[(rows,)](x, codes, scales, x.stride(0), static, COLUMNS=columns, BLOCK=block, **form)
    nearest, off = _nearest(x, scales, kind, static)
    return numpy64(codes) + np.where(off, np.inf, 0.0)[:, None], numpy64(nearest), 0.0


def _rotary(rng: Rng) -> Outcome:
    """Queries, and stored keys and values over their largest magnitudes."""
    kv_heads, dim, tokens = int(rng.integers(1, 4)), int(rng.choice([8, 16, 32, 80, 96, 128])), int(rng.integers(1, 8))
    heads, parts, kind = kv_heads * int(rng.integers(1, 5)), int(rng.integers(1, 4)), int(rng.integers(4))
    rotary, has_norm, block_tokens = (
        int(rng.choice([0, dim // 2, dim])),
        bool(rng.integers(2)),
        int(rng.choice([8, 16, 64])),
    )
    at_once, every = int(rng.choice([1, 2, 4])), heads + 2 * kv_heads
    qkv, positions = strided(rng, parts, tokens, every * dim), torch.from_numpy(rng.integers(0, 40, tokens))
    cos, sin = random(rng, 40, rotary // 2), random(rng, 40, rotary // 2)
    norms, pool = random(rng, 2, dim), Pool.empty(3, kv_heads, block_tokens, dim, kind)
    slots = rng.permutation(3 * block_tokens)[:tokens]
    slots[rng.random(tokens) < 0.2] = -1
    q = strided(rng, tokens, heads * dim, filled=False)
    stride, part_stride = qkv.stride(1), qkv.stride(0)
    whole = torch.as_strided(qkv, (qkv.untyped_storage().nbytes() // 4,), (1,))
    rotary_kv_write[(tokens, -(-heads // at_once) + -(-kv_heads // at_once))](
        *(whole, whole[heads * dim :], whole[(heads + kv_heads) * dim :], positions, torch.from_numpy(slots)),
        *(cos, sin, norms[0], norms[1], q, pool.codes, pool.scales, 1e-5),
        *(stride, stride, stride, part_stride, q.stride(0)),
        **pool.strides,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEADS_AT_ONCE=at_once,
        DIM=dim,
        BLOCK_DIM=power_of_two(dim, 16),
        ROTARY=rotary,
        BLOCK_TOKENS=block_tokens,
        PARTS=parts,
        HAS_NORM=has_norm,
        KIND=kind,
    )
    vectors = numpy64(qkv).sum(axis=0).reshape(tokens, every, dim)
    turned = vectors[:, : heads + kv_heads]
    if has_norm:
        weights = np.repeat(numpy64(norms), [heads, kv_heads], axis=0)
        turned = turned / np.sqrt((turned**2).mean(axis=-1, keepdims=True) + 1e-5) * weights
    turned = rope(turned, positions.numpy(), numpy64(cos), numpy64(sin)) if rotary else turned
    kept = np.concatenate([turned[:, heads:], vectors[:, heads + kv_heads :]], axis=1)
    found = written(q).reshape(tokens, heads, dim)
    queries = np.abs(found - turned[:, :heads]).max() / max(np.abs(turned[:, :heads]).max(), _LEAST)
    tokens_kept = np.flatnonzero(slots >= 0)
    stored = pool.vectors()[slots[tokens_kept] // block_tokens, :, :, slots[tokens_kept] % block_tokens]
    wanted = kept[tokens_kept].reshape(stored.shape)
    untouched = np.ones(3 * block_tokens, bool)
    untouched[slots[tokens_kept]] = False
    empty = pool.vectors().transpose(0, 3, 1, 2, 4).reshape(3 * block_tokens, -1)[untouched]
    largest = np.maximum(np.abs(wanted).max(axis=-1, keepdims=True), 1e-30)
    errors = np.abs(stored - wanted) / largest / (1.01 * STEPS[kind])  # in steps of the precision
    shares = [queries / 4e-6, errors.max(initial=0.0), np.inf if empty.any() else 0.0]
    return np.array([1.0, *shares]), np.array([1.0, 0.0, 0.0, 0.0]), 1.0


def _rotated(rng: Rng) -> Outcome:
    heads, dim, tokens = int(rng.integers(1, 5)), int(rng.choice([8, 32, 80, 128])), int(rng.integers(1, 6))
    rotary, dtype = int(rng.choice([dim // 2, dim])), dtype_of(rng)
    x, positions = strided(rng, tokens, heads * dim, dtype=dtype), torch.from_numpy(rng.integers(0, 9, tokens))
    cos, sin = random(rng, 9, rotary // 2), random(rng, 9, rotary // 2)
    out = strided(rng, tokens, heads * dim, filled=False)
    sizes = {"DIM": dim, "BLOCK_DIM": power_of_two(dim, 16), "ROTARY": rotary}
    rotate_heads[(tokens, heads)](x, positions, cos, sin, out, x.stride(0), out.stride(0), **sizes)
    wanted = rope(numpy64(x).reshape(tokens, heads, dim), positions.numpy(), numpy64(cos), numpy64(sin))
    return written(out).reshape(wanted.shape), wanted, 2e-6


def _fixed_splits(rng: Rng, *, joined: bool) -> Outcome:
    kv_heads, dim, kind = int(rng.integers(1, 3)), int(rng.choice([8, 16, 32, 80, 128])), int(rng.integers(4))
    heads, block_tokens, dtype = kv_heads * int(rng.integers(1, 5)), 16, dtype_of(rng)
    lengths = rng.integers(1, fixed_split_cases.SPLIT * fixed_split_cases.SPLITS + 1, rng.integers(1, 4)).tolist()
    counts = [int(rng.integers(1, min(length, 20) + 1)) for length in lengths]
    used = [-(-length // block_tokens) for length in lengths]
    floats = torch.float32 if kind == FLOAT and dtype == torch.float32 else None
    pool = Pool.random(rng, (sum(used) + 1, kv_heads, block_tokens, dim), kind, floats)
    poisoned, order = pool.codes if kind == FLOAT else pool.scales, rng.permutation(sum(used) + 1)
    tables = np.full((len(used), max(used) + 2), order[-1], np.int32)
    poisoned[order[-1]] = torch.nan
    for row, (count, length) in enumerate(zip(used, lengths, strict=True)):
        tables[row, :count], order = order[:count], order[count:]
        if length % block_tokens:
            poisoned[tables[row, count - 1], :, :, length % block_tokens :] = torch.nan
    options = {"softcap": float(rng.choice([0.0, 5.0])), "window": int(rng.choice([0, 1, 17, 60]))}
    q, scale = random(rng, sum(counts), heads, dim, dtype=dtype), float(rng.uniform(0.05, 0.4))
    given = (q, pool, torch.from_numpy(tables), torch.tensor(lengths, dtype=torch.int32), counts, scale)
    programs = int(rng.integers(2, 4)) if joined else 1
    found = fixed_split_cases.attention(
        *given, softcap=options["softcap"], window=int(options["window"]), programs=programs
    )
    wanted: list[Any] = []
    queries = numpy64(q)
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        keys, values = pool.sequence(tables[row], length)
        for end in range(length - count + 1, length + 1):
            wanted.append(
                attend(
                    queries[len(wanted)], keys[:end], values[:end], scale, options["softcap"], int(options["window"])
                )
            )
    return found, np.array(wanted), LIMITS[dtype]


def _carried(rng: Rng) -> Outcome:
    rows, sources = int(rng.integers(1, 200)), int(rng.integers(1, 50))
    ids, tokens = rng.integers(0, 1000, rows), rng.integers(-1, 1000, sources)
    carried = np.where(rng.random(rows) < 0.5, -1, rng.integers(0, sources, rows)).astype(np.int32)
    given = torch.from_numpy(ids.copy())
    carry_tokens[(-(-rows // 32),)](given, torch.from_numpy(carried), torch.from_numpy(tokens), rows, BLOCK=32)
    return numpy64(given), np.where(carried >= 0, np.maximum(tokens[carried], 0), ids).astype(np.float64), 0.0


def _greedy(rng: Rng) -> Outcome:
    logits = strided(rng, int(rng.integers(1, 5)), int(rng.integers(1, 500)))
    logits.copy_((logits * float(rng.choice([1.0, 0.5]))).round(decimals=int(rng.integers(0, 3))))  # ties
    rows, vocabulary = logits.shape
    block = int(rng.choice([16, 64, 512]))
    parts = next_power_of_two(-(-vocabulary // block))
    tokens, counters = torch.full((rows,), -7), torch.zeros(rows, dtype=torch.int32)
    firsts = torch.full((rows, parts), -7, dtype=torch.int32)
    memory = torch.full((rows, parts, 3), torch.nan), firsts, counters, torch.full((rows, 2), torch.nan)
    greedy[(rows, parts)](
        logits, *memory, tokens, logits.stride(0),
        VOCABULARY=vocabulary, BLOCK=block, PARTS=parts,
    )  # fmt: skip
    assert not counters.any()
    return numpy64(tokens), (numpy64(logits) + 0.0).argmax(axis=1).astype(np.float64), 0.0


RUNS: Mapping[str, Callable[[Rng], Outcome]] = {
    "rms_norm": _norm,
    "layer_norm": _layer_norm,
    "gather_rows": _gather,
    "gated_activation": _gated,
    "map_rows": _mapped,
    "combine_rows": _combined,
    "gather_columns": _columns,
    "matmul": _matmul,
    "quantize_rows": _codes,
    "rotary_kv_write": _rotary,
    "rotate_heads": _rotated,
    "fixed_split_attention": lambda rng: _fixed_splits(rng, joined=False),
    "join_fixed_splits": lambda rng: _fixed_splits(rng, joined=True),
    "carry_tokens": _carried,
    "greedy": _greedy,
    **expert_cases.RUNS,
    **recurrence_cases.RUNS,
    **latent_cases.RUNS,
    **low_rank_cases.RUNS,
}


def share_of_limit(kernel: str, seed: int) -> float:
    """Error of one random problem over its limit; infinite where a result is not finite, or written where none is."""
    found, wanted, limit = RUNS[kernel](np.random.default_rng([seed, *kernel.encode()]))
    assert found.shape == wanted.shape
    if not np.isfinite(found).all():
        return float("inf")
    error: NDArray[np.float64] = np.abs(found - wanted).max(initial=0.0) / max(np.abs(wanted).max(initial=0.0), _LEAST)
    if limit == 0:
        return float("inf") if error else 0.0
    return float(error / limit)
