"""References of the kernels that write and read the paged pool of keys and values: see references.py."""

import math
from collections.abc import Callable, Iterator, Mapping

import torch

from benchmarks.gpu.proofs.operands import Operands, Output
from ingot.kernels.kv_precision import FLOAT, FP8, INT4, INT8

CODES_LIMIT = 0.08  # of stored codes: of 256, the four or five that lie between two may round to the other
_LARGEST = {FP8.value: 448.0, INT8.value: 127.0, INT4.value: 7.0}


def strides_of_pool(of: Operands) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Strides of vectors and of scales over blocks, keys and values, heads, tokens (and elements)."""
    dim = of.size("DIM")
    width = dim // 2 if of.size("KIND") == INT4.value else dim
    tokens = of.size("BLOCK_TOKENS")
    vectors = (of.whole("block_stride"), of.whole("value_offset"), of.whole("head_stride"), width, 1)
    return vectors, (of.whole("scale_block_stride"), of.whole("scale_value_offset"), tokens, 1)


def _pool(of: Operands, blocks: int, kv_heads: int) -> torch.Tensor:
    """The layer's vectors [blocks, 2, KV heads, tokens, dim] in float32, decoded."""
    vectors, scales = strides_of_pool(of)
    shape = (blocks, 2, kv_heads, of.size("BLOCK_TOKENS"))
    stored = of.view("pool", (*shape, vectors[-2]), vectors)
    kind = of.size("KIND")
    if kind == FLOAT.value:
        return stored.float()
    if kind == INT4.value:
        packed = stored.to(torch.int32)
        stored = torch.stack([((packed & 15) ^ 8) - 8, ((packed >> 4) ^ 8) - 8], -1).flatten(-2)
    return stored.float() * of.view("scales", shape, scales).float()[..., None]


def rounded(x: torch.Tensor, kind: int, dtype: torch.dtype) -> torch.Tensor:
    """Vectors as the pool stores them, decoded again."""
    if kind == FLOAT.value:
        return x.to(dtype).float()
    scale = (x.abs().amax(-1, keepdim=True) / _LARGEST[kind]).clamp(max=65504).to(torch.float16).float()
    scale = torch.where(scale > 0, scale, 1.0)
    shares = (x / scale).clamp(-_LARGEST[kind], _LARGEST[kind])
    codes = shares.to(torch.float8_e4m3fn).float() if kind == FP8.value else shares.round()
    return codes * scale


def _rotary_kv_write(of: Operands) -> list[Output]:
    tokens, heads, kv_heads, dim = of.bound.grid[0], of.size("HEADS"), of.size("KV_HEADS"), of.size("DIM")
    positions, slots = of.view("positions", (tokens,)), of.view("slots", (tokens,))
    q, k, v = (
        of.parts(name, tokens, count * dim, f"{name}_stride", "part_stride").view(tokens, count, dim)
        for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
    )
    if of.size("HAS_NORM"):
        q, k = (_head_norm(of, x, f"{name}_norm") for name, x in (("q", q), ("k", k)))
    q, k = (turned(of, x, positions, of.size("ROTARY")) for x in (q, k))
    out = of.rows("q_out", tokens, heads * dim, "q_out_stride")
    made = [Output("q_out", out.float, q.reshape(tokens, -1), out)]
    known = slots >= 0
    if bool(known.any()):
        block, inner = slots[known] // of.size("BLOCK_TOKENS"), slots[known] % of.size("BLOCK_TOKENS")
        blocks = int(block.max()) + 1
        kind, dtype = of.size("KIND"), of.view("pool", (1,)).dtype
        for place, (name, x) in enumerate((("keys", k), ("values", v))):
            expected = rounded(x[known], kind, dtype).flatten(1)

            def found(place: int = place) -> torch.Tensor:
                return _pool(of, blocks, kv_heads)[block, place, :, inner].flatten(1)

            made.append(Output(name, found, expected, limit=None if kind == FLOAT.value else CODES_LIMIT))
    return made


def _head_norm(of: Operands, x: torch.Tensor, weight: str) -> torch.Tensor:
    factor = (x.square().mean(-1, keepdim=True) + of.number("epsilon")).rsqrt()
    return x * factor * of.view(weight, (x.shape[-1],)).float()


def turned(of: Operands, x: torch.Tensor, positions: torch.Tensor, rotary: int) -> torch.Tensor:
    """Rotate the first `rotary` dims of [tokens, heads, dim] by `cos` and `sin`."""
    half = rotary // 2
    if not half:
        return x
    rows = int(positions.max()) + 1
    c, s = (of.view(name, (rows, half))[positions][:, None] for name in ("cos", "sin"))
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * c - second * s, second * c + first * s, rest], -1)


def _sequences(of: Operands, kv_heads: int) -> Iterator[tuple[int, int, torch.Tensor, torch.Tensor]]:
    """Each sequence that is not padding: index, length, keys and values [KV heads, length, dim]."""
    size, stride = of.size("BLOCK_TOKENS"), of.whole("table_stride")
    lengths = {at: length for at, length in enumerate(of.view("lengths", (of.sequences,)).tolist()) if length}
    tables = {at: of.view("tables", (-(-length // size),), offset=at * stride).long() for at, length in lengths.items()}
    pool = _pool(of, max(int(table.max()) for table in tables.values()) + 1, kv_heads)
    for at, length in lengths.items():
        keys, values = pool[tables[at]].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]
        yield at, length, keys, values


def _attended(
    of: Operands, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """Queries [queries, heads, dim], the last of which is the last token, over [KV heads, tokens, dim]: same shape."""
    length, count, group = keys.shape[1], len(query), query.shape[1] // len(keys)
    positions = torch.arange(length - count, length, device=query.device)
    distance = positions[:, None] - torch.arange(length, device=query.device)
    window = of.whole("window")
    seen = (distance >= 0) & ((distance < window) if window else True)
    made = []
    for head, (key, value) in enumerate(zip(keys, values, strict=True)):
        own = query[:, head * group : (head + 1) * group].float().transpose(0, 1)  # [group, queries, dim]
        scores = own @ key.T * of.number("scale")
        if of.size("HAS_SOFTCAP"):
            scores = of.number("softcap") * torch.tanh(scores / of.number("softcap"))
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            extra = sinks[head * group : (head + 1) * group, None, None].float().expand(-1, count, 1)
            scores = torch.cat([scores, extra], -1)
        made.append((torch.softmax(scores, -1)[..., :length] @ value).transpose(0, 1))
    return torch.cat(made, 1)


def _decode_attention(of: Operands) -> list[Output]:
    """Attention in one piece, zeros for padding; the chunks' sums are garbage before the launch."""
    count, kv_heads, dim = of.bound.grid[0], of.size("KV_HEADS"), of.size("DIM")
    heads, chunks = kv_heads * of.size("GROUP"), of.size("CHUNKS")
    query = of.rows("q", count, heads * dim, "q_stride").view(count, heads, dim)
    sinks = of.view("sinks", (heads,)) if of.size("HAS_SINKS") else None
    expected = torch.zeros(count, heads, dim, device=query.device)
    for at, _, keys, values in _sequences(of, kv_heads):
        expected[at] = _attended(of, query[at : at + 1], keys, values, sinks)[0]
    for name, columns in (("sums", dim), ("weights", 2)):
        of.view(name, (count, heads, chunks, columns)).fill_(torch.nan)
    out = of.rows("out", count, heads * dim, "out_stride")
    counters = of.view("counters", (count, kv_heads))
    left = Output("counters", counters.float, torch.zeros(count, kv_heads, device=query.device), limit=0.0)
    return [Output("out", out.float, expected.flatten(1), out), left]


def _joined(sums: torch.Tensor, weights: torch.Tensor, count: int, base: float = torch.e) -> torch.Tensor:
    """Join partial softmaxes: sums [heads, parts, dim], weights [heads, parts, 2] -> [heads, dim]."""
    largest, total = weights[:, :count, 0], weights[:, :count, 1]
    shares = base ** (largest - largest.amax(1, keepdim=True))
    return (sums[:, :count] * shares[..., None]).sum(1) / (total * shares).sum(1, keepdim=True)


def _ragged(of: Operands, heads: int, kv_heads: int) -> Iterator[tuple[int, torch.Tensor]]:
    """First query and attention [queries, heads, dim] of each sequence."""
    dim = of.size("DIM")
    starts = of.view("query_starts", (of.sequences + 1,)).tolist()
    sinks = of.view("sinks", (heads,)) if of.constants.get("HAS_SINKS") else None
    if sinks is not None and "SPLIT" in of.constants:
        sinks = sinks * math.log(2)  # they are exponents of 2
    for sequence, _, keys, values in _sequences(of, kv_heads):
        begin, count = starts[sequence], starts[sequence + 1] - starts[sequence]
        if count:
            offset = begin * of.whole("q_stride")
            query = of.rows("q", count, heads * dim, "q_stride", offset).view(count, heads, dim)
            yield begin, _attended(of, query, keys, values, sinks)


def _ragged_attention(of: Operands) -> list[Output]:
    return _unsplit(of, of.bound.grid[1])


def _unsplit(of: Operands, kv_heads: int) -> list[Output]:
    """Rows of each sequence, written whole by one program for each KV head."""
    heads = kv_heads * of.size("GROUP")
    made = []
    for begin, expected in _ragged(of, heads, kv_heads):
        offset = begin * of.whole("out_stride")
        out = of.rows("out", len(expected), heads * of.size("DIM"), "out_stride", offset)
        made.append(Output("out", out.float, expected.flatten(1), out))
    return made


def _fixed_split_attention(of: Operands) -> list[Output]:
    """Written whole by one program, or as splits, which torch joins."""
    return _unsplit(of, of.size("KV_HEADS")) if of.bound.grid[2] == 1 else _as_splits(of)


def _as_splits(of: Operands) -> list[Output]:
    kv_heads, dim, splits = of.size("KV_HEADS"), of.size("DIM"), of.size("SPLITS")
    heads, made = kv_heads * of.size("GROUP"), []
    starts, lengths = (
        of.view("query_starts", (of.sequences + 1,)).tolist(),
        of.view("lengths", (of.sequences,)).tolist(),
    )
    ends = {
        start: end for start, end, length in zip(starts, starts[1:], lengths, strict=False) if length and end > start
    }
    last = dict(zip(starts, lengths, strict=False))
    for begin, expected in _ragged(of, heads, kv_heads):
        count = ends[begin] - begin
        sums = of.view("sums", (count, heads, splits, dim), offset=begin * heads * splits * dim)
        weights = of.view("weights", (count, heads, splits, 2), offset=begin * heads * splits * 2)
        positions = range(last[begin] - count, last[begin])

        def found(
            sums: torch.Tensor = sums, weights: torch.Tensor = weights, positions: range = positions
        ) -> torch.Tensor:
            each = [_splits_of(of, sums[at], weights[at], where) for at, where in enumerate(positions)]
            return torch.stack(each).flatten(1)

        made.append(Output("sums", found, expected.flatten(1), sums))
        weights.fill_(torch.nan)
    return made


def _splits_of(of: Operands, sums: torch.Tensor, weights: torch.Tensor, position: int) -> torch.Tensor:
    """Join the splits that a query at this position sees: [heads, dim]."""
    window, size = of.whole("window"), of.size("SPLIT")
    earliest = max(position - window + 1, 0) if window else 0
    seen = slice(earliest // size, position // size + 1)
    sums, weights = sums[:, seen], weights[:, seen]
    if of.constants.get("HAS_SINKS"):
        sums, weights = _with_sinks(of, sums, weights)
    return _joined(sums, weights, sums.shape[1], base=2.0)


def _with_sinks(of: Operands, sums: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One part more, of the sinks alone: sums [.., heads, parts, dim], weights [.., heads, parts, 2]."""
    sinks = of.view("sinks", (sums.shape[-3],)).float()
    extra = torch.stack([sinks, torch.ones_like(sinks)], -1)[:, None].expand(*weights.shape[:-2], 1, 2)
    return torch.cat([sums, torch.zeros_like(sums[..., :1, :])], -2), torch.cat([weights, extra], -2)


def _join_fixed_splits(of: Operands) -> list[Output]:
    (count, heads, _), dim, splits = of.bound.grid, of.size("DIM"), of.size("SPLITS")
    positions = of.view("positions", (count,)).tolist()
    sums, weights = of.view("sums", (count, heads, splits, dim)), of.view("weights", (count, heads, splits, 2))
    expected = torch.stack([_splits_of(of, sums[at], weights[at], where) for at, where in enumerate(positions)])
    out = of.rows("out", count, heads * dim, "out_stride")
    return [Output("out", out.float, expected.flatten(1), out)]


ATTENTION: Mapping[str, Callable[[Operands], list[Output]]] = {
    "decode_attention": _decode_attention,
    "fixed_split_attention": _fixed_split_attention,
    "join_fixed_splits": _join_fixed_splits,
    "prefill_attention": _ragged_attention,
    "ragged_attention": _ragged_attention,
    "rotary_kv_write": _rotary_kv_write,
}
