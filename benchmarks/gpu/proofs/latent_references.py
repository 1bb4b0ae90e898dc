"""References of the kernels of latent attention, by torch in float32: see references.py."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from benchmarks.gpu.proofs.attention_references import CODES_LIMIT, rounded, turned
from benchmarks.gpu.proofs.operands import Operands, Output
from benchmarks.gpu.proofs.packed_weights import dequantized
from ingot.kernels.kv_precision import FLOAT


def fill_latent_scales(of: Operands, blocks: int) -> None:
    """Random scales of a pool of 8 bits."""
    strides = (of.whole("scale_block_stride"), 1)
    of.view("scales", (blocks, of.size("BLOCK_TOKENS")), strides).uniform_(0.01, 0.03)


def _pool(of: Operands, blocks: int) -> torch.Tensor:
    """The layer's keys [blocks, tokens, ROPE + RANK], decoded."""
    tokens, width = of.size("BLOCK_TOKENS"), of.size("ROPE") + of.size("RANK")
    stored = of.view("pool", (blocks, tokens, width), (of.whole("block_stride"), width, 1)).float()
    if of.size("KIND") == FLOAT.value:
        return stored
    return stored * of.view("scales", (blocks, tokens, 1), (of.whole("scale_block_stride"), 1, 1)).float()


def _latent_kv_write(of: Operands) -> list[Output]:
    tokens, rank, rope = of.bound.grid[0], of.size("RANK"), of.size("ROPE")
    positions, slots = of.view("positions", (tokens,)), of.view("slots", (tokens,))
    latent, part = (
        of.parts(name, tokens, width, "x_stride", "part_stride", of.whole(f"{name}_offset"))
        for name, width in (("latent", rank), ("rope", rope))
    )
    latent = latent * (latent.square().mean(-1, keepdim=True) + of.number("epsilon")).rsqrt()
    latent = latent * of.view("norm", (rank,)).float()
    keys = torch.cat([turned(of, part[:, None], positions, rope)[:, 0], latent], -1)
    known = slots >= 0
    if not bool(known.any()):
        return []
    block, inner = slots[known] // of.size("BLOCK_TOKENS"), slots[known] % of.size("BLOCK_TOKENS")
    blocks, kind = int(block.max()) + 1, of.size("KIND")
    expected = rounded(keys[known], kind, of.view("pool", (1,)).dtype)
    limit = None if kind == FLOAT.value else CODES_LIMIT
    return [Output("keys", lambda: _pool(of, blocks)[block, inner], expected, limit=limit)]


@dataclass(frozen=True)
class _Sequence:
    """A sequence of the step: its number, its first query, and its keys [length, ROPE + RANK]."""

    number: int
    first: int
    count: int
    keys: torch.Tensor


def _sequences(of: Operands, starts: list[int]) -> list[_Sequence]:
    """Those with queries: `starts` are the first queries of each, and their number."""
    size = of.size("BLOCK_TOKENS")
    found = [
        (number, length, starts[number + 1] - starts[number])
        for number, length in enumerate(of.view("lengths", (of.sequences,)).tolist())
        if length and starts[number + 1] > starts[number]
    ]
    tables = [
        of.view("tables", (-(-length // size),), offset=number * of.whole("table_stride")).long()
        for number, length, _ in found
    ]
    pool = _pool(of, max(int(table.max()) for table in tables) + 1)
    return [
        _Sequence(number, starts[number], count, pool[table].flatten(0, 1)[:length])
        for (number, length, count), table in zip(found, tables, strict=True)
    ]


def _attended(of: Operands, one: _Sequence) -> torch.Tensor:
    """Attention of its last `count` tokens: [count, HEADS * RANK]."""
    heads, rank, rope = of.size("HEADS"), of.size("RANK"), of.size("ROPE")
    count, length = one.count, len(one.keys)
    strides, first = (of.whole("q_stride"), of.size("HEAD_DIM"), 1), one.first * of.whole("q_stride")
    part = of.view("q", (count, heads, rope), strides, first + of.whole("q_offset")).float()
    strides, first = (of.whole("absorbed_stride"), rank, 1), one.first * of.whole("absorbed_stride")
    absorbed = of.view("absorbed", (count, heads, rank), strides, first).float()
    positions = torch.arange(length - count, length, device=part.device)
    query = torch.cat([turned(of, part, positions, rope), absorbed], -1).transpose(0, 1)
    scores = query @ one.keys.T * of.number("scale")  # [heads, count, length]
    seen = torch.arange(length, device=part.device) <= positions[:, None]
    shares = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1)
    return (shares @ one.keys[:, rope:]).transpose(0, 1).flatten(1)


def _latent_decode_attention(of: Operands) -> list[Output]:
    """Attention in one piece, zeros for padding; the chunks' sums are garbage before the launch."""
    (count, tiles, _), heads, rank, chunks = of.bound.grid, of.size("HEADS"), of.size("RANK"), of.size("CHUNKS")
    out = of.rows("out", count, heads * rank, "out_stride")
    expected = torch.zeros(count, heads * rank, device=out.device)
    for one in _sequences(of, list(range(count + 1))):
        expected[one.number] = _attended(of, one)[0]
    for name, columns in (("sums", rank), ("weights", 2)):
        of.view(name, (count, heads, chunks, columns)).fill_(torch.nan)
    counters = of.view("counters", (count, tiles))
    left = Output("counters", counters.float, torch.zeros(count, tiles, device=out.device), limit=0.0)
    return [Output("out", out.float, expected, out), left]


def _latent_ragged_attention(of: Operands) -> list[Output]:
    starts, columns = of.view("query_starts", (of.sequences + 1,)).tolist(), of.size("HEADS") * of.size("RANK")
    made = []
    for one in _sequences(of, starts):
        out = of.rows("out", one.count, columns, "out_stride", one.first * of.whole("out_stride"))
        made.append(Output("out", out.float, _attended(of, one), out))
    return made


def _multiplied(of: Operands, weight: torch.Tensor) -> list[Output]:
    """x by each head's weight [heads, N, COLUMNS]."""
    rows, (heads, n, columns) = of.whole("rows"), weight.shape
    strides = (of.whole("x_stride"), of.size("HEAD_STRIDE"), 1)
    x = of.view("x", (rows, heads, columns), strides, of.whole("x_offset")).float()
    out = of.rows("out", rows, heads * n, "out_stride")
    return [Output("out", out.float, torch.einsum("rhk,hnk->rhn", x, weight).flatten(1), out)]


def _head_matmul(of: Operands) -> list[Output]:
    return _multiplied(of, of.view("weight", (of.bound.grid[2], of.size("N"), of.size("COLUMNS"))).float())


def _head_matmul_nbits(of: Operands) -> list[Output]:
    n = of.size("N")
    rows = torch.arange(n, device=of.view("codes", (1,)).device)
    heads = [dequantized(of, n, rows, of.size("COLUMNS"), head) for head in range(of.bound.grid[2])]
    return _multiplied(of, torch.stack(heads))


LATENTS: Mapping[str, Callable[[Operands], list[Output]]] = {
    "head_matmul": _head_matmul,
    "head_matmul_nbits": _head_matmul_nbits,
    "latent_decode_attention": _latent_decode_attention,
    "latent_kv_write": _latent_kv_write,
    "latent_ragged_attention": _latent_ragged_attention,
}
