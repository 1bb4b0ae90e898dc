"""Expected outputs of each kernel, computed by torch in float32 from a launch's operands in device memory.

A reference is a function of `Operands` that returns the launch's outputs. To add a kernel, add its function to
REFERENCES; a packed kernel without one is reported as a failure.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch.nn import functional

from benchmarks.gpu.proofs.attention_references import ATTENTION
from benchmarks.gpu.proofs.expert_references import EXPERTS
from benchmarks.gpu.proofs.latent_references import LATENTS
from benchmarks.gpu.proofs.operands import Operands, Output
from benchmarks.gpu.proofs.packed_weights import dequantized, halves
from benchmarks.gpu.proofs.recurrence_references import RECURRENCES
from ingot.kernels.elementwise import ADD
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
)
from ingot.kernels.kv_precision import FLOAT
from ingot.kernels.matmul import FP8_WEIGHT

_ACTIVATIONS: Mapping[int, Callable[[torch.Tensor], torch.Tensor]] = {
    SILU.value: functional.silu,
    GELU_ERF.value: functional.gelu,
    GELU_TANH.value: partial(functional.gelu, approximate="tanh"),
    IDENTITY.value: torch.clone,
    SIGMOID.value: torch.sigmoid,
    RELU.value: torch.relu,
}


def _activated(of: Operands, x: torch.Tensor) -> torch.Tensor:
    if of.size("KIND") == CLAMP.value:
        least, most = of.view("numbers", (2,)).tolist()
        return x.clamp(least, most)
    if of.size("KIND") != XIELU.value:
        return _ACTIVATIONS[of.size("KIND")](x)
    a, b, beta, eps = of.view("numbers", (4,))
    made: torch.Tensor = torch.where(x > 0, a * x * x, b * (torch.expm1(torch.minimum(x, eps)) - x)) + beta * x
    return made


def _gated(of: Operands, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    if of.size("KIND") != CLAMPED_SWIGLU.value:
        return _activated(of, gate) * up
    alpha, limit = of.view("numbers", (2,)).tolist()
    g = gate.clamp(max=limit)
    return g * torch.sigmoid(alpha * g) * (up.clamp(-limit, limit) + 1)


# Logits of a row that rounding may put in the next bin.
_BORDER_LOGITS = 4
_SHARE_ERROR = 1e-4  # error of the place of a sampled token in the sum of all shares


def _stored(name: str, memory: torch.Tensor, expected: torch.Tensor, *, is_read: bool = False) -> Output:
    return Output(name, memory.float, expected, None if is_read else memory)


def _exact(name: str, memory: torch.Tensor, expected: torch.Tensor) -> Output:
    """Whole numbers: every one that differs is an error of 1."""
    return Output(
        name, lambda: (memory != expected).double()[:, None] + 1, torch.ones_like(expected)[:, None], memory, 0
    )


def _normed(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + epsilon).rsqrt() * weight.float()


def _sum_before_norm(of: Operands) -> tuple[torch.Tensor, list[Output]]:
    """The input of a norm kernel, and the output of its residual addition."""
    rows, columns, gathers = of.bound.grid[0], of.size("COLUMNS"), bool(of.constants.get("GATHERS"))
    indices = of.view("indices", (rows,)) if gathers else torch.arange(rows)
    read, at = int(indices.max().clamp(min=0)) + 1, indices.clamp(min=0)
    h = of.parts("x", read, columns, "x_stride", "part_stride")
    at = at.to(h.device)
    h = h[at]
    if of.constants.get("HAS_INNER"):
        h = _normed(h, of.view("inner_weight", (columns,)), of.number("inner_epsilon"))
    if not of.size("HAS_RESIDUAL"):
        return h, []
    h = h + of.rows("residual", read, columns, "residual_stride")[at].float()
    h = h * (indices >= 0).to(h.device)[:, None]
    total = of.rows("sum_out", rows, columns, "sum_stride")
    made = _stored("sum_out", total, h, is_read=of.number("sum_out") == of.number("residual"))
    return h.to(total.dtype).float(), [made]


def _norm_outputs(of: Operands, y: torch.Tensor) -> list[Output]:
    """The rows of a norm's result. Their codes, which no packed program has, are left to the tests' cases."""
    return [_stored("out", of.rows("out", of.bound.grid[0], of.size("COLUMNS"), "out_stride"), y)]


def _rms_norm(of: Operands) -> list[Output]:
    h, made = _sum_before_norm(of)
    if of.size("HAS_OUTER"):
        made += _norm_outputs(of, _normed(h, of.view("weight", (of.size("COLUMNS"),)), of.number("epsilon")))
    return made


def _layer_norm(of: Operands) -> list[Output]:
    columns, (h, made) = of.size("COLUMNS"), _sum_before_norm(of)
    y = _normed(h - h.mean(-1, keepdim=True), of.view("weight", (columns,)), of.number("epsilon"))
    if of.size("HAS_BIAS"):
        y = y + of.view("bias", (columns,)).float()
    return made + _norm_outputs(of, y)


def _indices(of: Operands, rows: int) -> torch.Tensor:
    """The indices of gathered rows: given, or tokens of the previous step."""
    indices = of.view("indices", (rows,))
    if not of.constants.get("CARRIES"):
        return indices
    carried = of.view("carried", (rows,)).long()
    tokens = of.view("tokens", (max(int(carried.max()), 0) + 1,))
    return torch.where(carried >= 0, tokens[carried.clamp(min=0)].clamp(min=0), indices)


def _gather_rows(of: Operands) -> list[Output]:
    rows, columns = of.bound.grid[0], of.size("COLUMNS")
    indices = _indices(of, rows)
    table = of.rows("table", int(indices.max().clamp(min=0)) + 1, columns, "table_stride")
    expected = table[indices.clamp(min=0)].float() * of.number("alpha") * (indices >= 0)[:, None]
    return [_stored("out", of.rows("out", rows, columns, "out_stride"), expected)]


def _gather_quantized_rows(of: Operands) -> list[Output]:
    rows, columns = of.bound.grid[0], of.size("COLUMNS")
    indices = _indices(of, rows)
    weight = dequantized(of, of.size("TABLE_ROWS"), indices.clamp(min=0), columns)
    expected = weight * of.number("alpha") * (indices >= 0)[:, None]
    return [_stored("out", of.rows("out", rows, columns, "out_stride"), expected)]


def _all_rows(of: Operands, name: str, begin: int, count: int) -> torch.Tensor:
    return torch.arange(begin, begin + count, device=of.view(name, (1,)).device)


def _matmul_nbits(of: Operands) -> list[Output]:
    n, columns = of.size("N"), of.size("COLUMNS")
    weight = dequantized(of, n, _all_rows(of, "codes", 0, n), columns)
    return _multiplied(of, weight, 1.0, of.bound.grid[2])


def _matmul(of: Operands) -> list[Output]:
    n, columns, kind = of.size("N"), of.size("COLUMNS"), of.size("KIND")
    weight, scale = of.view("weight", (n, columns)).float(), torch.ones(())
    if kind not in (FLOAT.value, FP8_WEIGHT.value):
        scale = of.view("x_scales", (of.whole("rows"), 1))
    if kind != FLOAT.value:
        weight = weight * of.view("weight_scales", (n, 1)).float()
    return _multiplied(of, weight, scale, of.bound.grid[1])


def _multiplied(of: Operands, weight: torch.Tensor, scale: torch.Tensor | float, splits: int) -> list[Output]:
    """softcap(alpha * scale * x @ W^T + bias), or its partials [splits, rows, n], whose sum is compared."""
    rows, (n, columns) = of.whole("rows"), weight.shape
    expected = of.rows("x", rows, columns, "x_stride").float() @ weight.T * scale * of.number("alpha")
    if of.size("HAS_BIAS"):
        expected = expected + of.view("bias", (n,)).float()
    if of.size("HAS_SOFTCAP") and of.size("SPLITS") == 1:
        expected = of.number("softcap") * torch.tanh(expected / of.number("softcap"))
    if "GATE" in of.constants:
        gate, up = halves(expected)
        expected = _ACTIVATIONS[of.size("GATE")](gate) * up
    stride = of.whole("out_stride")
    out = of.view("out", (splits, rows, expected.shape[1]), (rows * stride, stride, 1))
    return [Output("out", lambda: out.float().sum(0), expected, out)]


def _dequantize_nbits(of: Operands) -> list[Output]:
    first, count, columns = of.whole("first"), of.whole("count"), of.size("COLUMNS")
    weight = dequantized(of, of.size("N"), _all_rows(of, "codes", first, count), columns)
    return [_stored("out", of.view("out", (count, columns)), weight)]


def _gated_activation(of: Operands) -> list[Output]:
    rows, columns = of.bound.grid[0], of.size("COLUMNS")
    if of.constants.get("INTERLEAVED"):
        gate, up = halves(of.parts("gate", rows, 2 * columns, "gate_stride", "gate_part_stride"))
    else:
        gate = of.parts("gate", rows, columns, "gate_stride", "gate_part_stride")
        up = of.parts("up", rows, columns, "up_stride", "up_part_stride", of.whole("up_offset"))
    out = of.rows("out", rows, columns, "out_stride")
    return [_stored("out", out, _gated(of, gate, up))]


def _combine_rows(of: Operands) -> list[Output]:
    rows, columns = of.bound.grid[0], of.size("COLUMNS")
    left = of.parts("left", rows, columns, "left_stride", "left_part_stride")
    right = of.rows("right", rows, columns, "right_stride").float()
    expected = left + right if of.size("KIND") == ADD.value else left * right
    return [_stored("out", of.rows("out", rows, columns, "out_stride"), expected)]


def _map_rows(of: Operands) -> list[Output]:
    rows, columns = of.bound.grid[0], of.size("COLUMNS")
    x = of.parts("x", rows, columns, "x_stride", "part_stride", of.whole("x_offset"))
    y = _activated(of, x * of.number("alpha"))
    if of.size("HAS_SOFTCAP"):
        y = of.number("softcap") * torch.tanh(y / of.number("softcap"))
    return [_stored("out", of.rows("out", rows, columns, "out_stride"), y)]


def _greedy(of: Operands) -> list[Output]:
    logits = of.rows("logits", of.bound.grid[0], of.size("VOCABULARY"), "stride")
    facts = torch.stack([logits.double().max(-1).values, logits.double().mean(-1)], -1)
    return [
        _exact("tokens", of.view("tokens", (len(logits),)), logits.argmax(-1)),
        _stored("facts", of.view("facts", (len(logits), 2)), facts),
    ]


def binned(of: Operands) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts [rows, parts, bins] and sums of shares [rows, parts] of each block of logits."""
    rows, parts, block, bins = of.bound.grid[0], of.size("PARTS"), of.size("BLOCK"), of.size("BINS")
    logits = of.rows("logits", rows, of.size("VOCABULARY"), "stride").float()
    top, mean = of.view("facts", (rows, 2)).T[:, :, None]
    shares = torch.exp((logits - top) / of.view("temperatures", (rows, 1)))
    places = ((top - logits) * (bins / (top - mean).clamp(min=1e-30))).clamp(max=bins - 1).long()
    block_of = torch.arange(logits.shape[1], device=logits.device) // block
    counts = torch.zeros(rows, parts * bins, dtype=torch.int32, device=logits.device)
    counts.scatter_add_(1, block_of * bins + places, torch.ones_like(places, dtype=torch.int32))
    masses = torch.zeros(rows, parts, device=logits.device).index_add_(1, block_of, shares)
    return counts.view(rows, parts, bins), masses


def _bin_logits(of: Operands) -> list[Output]:
    """A logit at the border of two bins may be in the other one."""
    counts, masses = binned(of)
    stored = of.view("counts", tuple(counts.shape))

    def difference() -> torch.Tensor:
        return (stored.long() - counts).abs().sum((1, 2)).double()[:, None] / 2 + 1

    ones = torch.ones(len(counts), 1, device=counts.device)
    number = Output("counts", difference, ones, stored, _BORDER_LOGITS)
    return [number, _stored("masses", of.view("masses", tuple(masses.shape)), masses)]


def _draw(of: Operands) -> list[Output]:
    """The token is where the sum of kept shares passes `uniform`, up to rounding: a distance of 0 is right."""
    count = of.bound.grid[0]
    logits = of.rows("logits", count, of.size("VOCABULARY"), "stride").double()
    temperatures, tops, uniforms = (of.view(name, (count,)).double() for name in ("temperatures", "top_ps", "uniforms"))
    tokens, limits = of.view("tokens", (count,)), of.view("top_ks", (count,))
    spans = [_kept(*row) for row in zip(logits, temperatures, limits.tolist(), tops.tolist(), strict=True)]

    def distance() -> torch.Tensor:
        found = []
        for (ends, shares), token, uniform in zip(spans, tokens.tolist(), uniforms.tolist(), strict=True):
            if not 0 <= token < len(ends) or not float(shares[token]) > 0:
                found.append(1.0)
                continue
            end, share = float(ends[token]), float(shares[token])
            found.append(max(0.0, end - share - uniform, uniform - end))
        return torch.tensor(found)[:, None] + 1

    # Not cleared before the launch: it reads the tokens of `greedy`.
    return [Output("tokens", distance, torch.ones(count, 1), None, _SHARE_ERROR)]


def _kept(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: int, top_p: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Running sum and shares of the kept tokens in the vocabulary's order; both sum to 1."""
    if not float(temperature) > 0:
        shares = functional.one_hot(logits.argmax(), len(logits)).double()
        return shares.cumsum(0), shares
    shares = torch.softmax(logits / temperature, -1)
    if 0 < top_k < len(logits):
        shares = torch.where(logits >= logits.topk(top_k).values[-1], shares, 0.0)
    shares = shares / shares.sum()
    ordered, places = shares.sort(descending=True, stable=True)
    before = ordered.cumsum(0) - ordered
    kept = torch.zeros_like(shares).index_put((places,), torch.where(before < top_p, ordered, 0.0))
    kept = kept / kept.sum()
    return kept.cumsum(0), kept


REFERENCES: Mapping[str, Callable[[Operands], list[Output]]] = {
    "bin_logits": _bin_logits,
    "combine_rows": _combine_rows,
    "dequantize_nbits": _dequantize_nbits,
    "draw": _draw,
    "gated_activation": _gated_activation,
    "gather_quantized_rows": _gather_quantized_rows,
    "gather_rows": _gather_rows,
    "greedy": _greedy,
    "map_rows": _map_rows,
    "matmul": _matmul,
    "matmul_int4": _matmul_nbits,
    "matmul_int4_wide": _matmul_nbits,
    "matmul_nbits": _matmul_nbits,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    **ATTENTION,
    **EXPERTS,
    **LATENTS,
    **RECURRENCES,
}
