"""Operands and expected outputs of the kernels of recurrent layers, by torch in float64.

A launch is checked alone, so decays, gates, and what recurrence_chunks would have made are random, but of the right
signs. States are compared too: a kernel replaces those of the step's sequences.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch

from benchmarks.gpu.proofs.operands import Operands, Output
from ingot.kernels.recurrence import L2_EPSILON, SIGMOID, SOFTPLUS, STATE_TILE

_LEAST_DECAY = 0.1  # of random decays: a state is neither lost at once nor kept for ever


@dataclass(frozen=True)
class _Sequence:
    """A sequence of the step: its first row, tokens in the step, tokens after it, and its slot."""

    first: int
    count: int
    length: int
    slot: int

    @property
    def rows(self) -> slice:
        """Its rows."""
        return slice(self.first, self.first + self.count)

    @property
    def is_new(self) -> bool:
        """Whether it begins with the step."""
        return self.length == self.count


def fill_recurrence(of: Operands) -> None:
    """Random decays, gates and chunks in what other launches would have written, and random states."""
    rows = sum(one.count for one in _sequences(of)) if "lengths" in of.names else 0
    heads = of.size("HEADS") if "HEADS" in of.constants else 0
    if "gate" in of.names:
        of.view("gate", (rows, heads)).uniform_(_LEAST_DECAY, 1)
        rates = of.view("rate", (heads,)) if of.size("IS_SCAN") else of.view("decay", (rows, heads))
        rates.uniform_(-1, -_LEAST_DECAY)
    if "inverses" in of.names and "out" in of.names:
        chunk = of.size("CHUNK")
        for name in ("weights", *(() if of.size("IS_SCAN") else ("inverses",))):
            of.view(name, (rows, heads, chunk)).normal_(std=chunk**-0.5)
        of.view("factors", (rows, heads, 2)).uniform_(0.05, 0.2)
    if "states" in of.names:
        for one in _sequences(of):
            _slot(of, one).normal_()


def _sequences(of: Operands) -> Iterator[_Sequence]:
    count = of.sequences
    lengths = of.view("lengths", (count,)).tolist()
    slots = of.view("state_slots", (count,)).tolist() if "state_slots" in of.names else [0] * count
    is_ragged = bool(of.constants.get("RAGGED", True))
    starts = of.view("query_starts", (count + 1,)).tolist() if is_ragged else list(range(count + 1))
    for number, length in enumerate(lengths):
        if length:
            yield _Sequence(starts[number], starts[number + 1] - starts[number], length, slots[number])


def _slot(of: Operands, one: _Sequence) -> torch.Tensor:
    """The part of a sequence's state that the launch reads and replaces, flat."""
    if "TAPS" in of.constants:
        size = (of.size("TAPS") - 1) * of.size("CHANNELS")
    else:
        size = of.size("HEADS") * of.size("KEYS") * -(-of.size("VALUES") // 16) * 16
    return of.view("states", (size,), offset=one.slot * of.whole("slot_stride"))


def _short_convolution(of: Operands) -> list[Output]:
    channels, taps = of.size("CHANNELS"), of.size("TAPS")
    weight = of.view("weight", (taps, channels)).double()
    found: list[torch.Tensor] = []
    wanted: list[torch.Tensor] = []
    for one in _sequences(of):
        x = of.parts("x", one.first + one.count, channels, "x_stride", "part_stride")[one.rows].double()
        slot = _slot(of, one).view(taps - 1, channels)
        kept = torch.zeros_like(slot, dtype=torch.float64) if one.is_new else slot.double()
        inputs = torch.cat([kept, x])
        total = sum(weight[j] * inputs[j : j + one.count] for j in range(taps)) + torch.zeros_like(x)
        if of.size("HAS_BIAS"):
            total = total + of.view("bias", (channels,)).double()
        wanted += [torch.nn.functional.silu(total) if of.size("HAS_SILU") else total, inputs[one.count :]]
        found += [of.rows("out", one.first + one.count, channels, "out_stride")[one.rows], slot]
    return _outputs(found, wanted)


def _recurrence_rates(of: Operands) -> list[Output]:
    rows, columns, curve = of.bound.grid[0], of.size("COLUMNS"), of.size("CURVE")
    y = of.parts("x", rows, columns, "x_stride", "part_stride", of.whole("x_offset")).double()
    if of.size("HAS_BIAS"):
        y = y + of.view("bias", (columns,)).double()
    if curve == SOFTPLUS.value:
        y = torch.nn.functional.softplus(y, threshold=1e9)
    if curve == SIGMOID.value:
        y = torch.sigmoid(y)
    y = of.number("alpha") * y.clamp(of.number("least"), of.number("most"))
    if of.size("HAS_FACTORS"):
        y = y * of.view("factors", (columns,)).double()
    out = of.view("out", (rows, columns))
    return [Output("out", out.float, y, out)]


@dataclass(frozen=True)
class _Operands:
    """One sequence's operands by head: q and k [tokens, heads, KEYS], v [tokens, heads, VALUES], [tokens, heads]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    decay: torch.Tensor
    gate: torch.Tensor

    @classmethod
    def of(cls, of: Operands, one: _Sequence) -> "_Operands":
        heads, key_heads, keys = (of.size(name) for name in ("HEADS", "KEY_HEADS", "KEYS"))
        values, end = int(of.constants.get("VALUES", 1)), one.first + one.count

        def by_head(name: str, count: int, width: int) -> torch.Tensor:
            read = of.rows(name, end, count * width, f"{name}_stride")[one.rows].double()
            return read.reshape(one.count, count, width).repeat_interleave(heads // count, 1)

        gate = of.view("gate", (end, heads))[one.rows].double()
        if of.size("IS_SCAN"):
            decay = gate * of.view("rate", (heads,)).double()
        else:
            decay = of.view("decay", (end, heads))[one.rows].double()
        v = by_head("v", heads, values) if "v" in of.names else gate[:, :, None]
        return cls(by_head("q", key_heads, keys), by_head("k", key_heads, keys), v, decay, gate)


def _state(of: Operands, one: _Sequence) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Views of the tiles [heads, KEYS, width] of a sequence's state, without padding, and the state before the step."""
    heads, keys, values, tile = of.size("HEADS"), of.size("KEYS"), of.size("VALUES"), STATE_TILE.value
    padded = -(-values // 16) * 16
    flat, tiles = _slot(of, one).view(heads, keys * padded), []
    for start in range(0, padded, tile):
        width = min(tile, padded - start)
        part = flat[:, start * keys : (start + width) * keys].view(heads, keys, width)
        tiles.append(part[:, :, : min(width, values - start)])
    whole = torch.cat([part.double() for part in tiles], 2)
    return tiles, torch.zeros_like(whole) if one.is_new else whole


def _recurrence(of: Operands) -> list[Output]:
    found: list[torch.Tensor] = []
    wanted: list[torch.Tensor] = []
    heads, values, most = of.size("HEADS"), of.size("VALUES"), of.size("MOST")
    for one in _sequences(of):
        if most and one.count > most:
            continue
        given = _Operands.of(of, one)
        q, k = (x * _factor(of, x)[..., None] for x in (given.q, given.k))
        tiles, s = _state(of, one)
        results = []
        for t in range(one.count):
            s = s * given.decay[t].exp()[:, None, None]
            seen = 0.0 if of.size("IS_SCAN") else torch.einsum("hk,hkv->hv", k[t], s)
            s = s + k[t][:, :, None] * (given.gate[t][:, None] * (given.v[t] - seen))[:, None, :]
            results.append(_skipped(of, of.number("scale") * torch.einsum("hk,hkv->hv", q[t], s), given.v[t]))
        _add(of, one, found, wanted, torch.stack(results), tiles, s, heads * values)
    return _outputs(found, wanted)


def _factor(of: Operands, x: torch.Tensor) -> torch.Tensor:
    normalizes = bool(of.size("NORMALIZES"))
    return (x.square().sum(-1) + L2_EPSILON.value).rsqrt() if normalizes else torch.ones_like(x[..., 0])


def _skipped(of: Operands, result: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return result + of.view("skip", (v.shape[-2],)).double()[:, None] * v if of.size("IS_SCAN") else result


def _add(
    of: Operands,
    one: _Sequence,
    found: list[torch.Tensor],
    wanted: list[torch.Tensor],
    results: torch.Tensor,
    tiles: list[torch.Tensor],
    state: torch.Tensor,
    columns: int,
) -> None:
    """Add a sequence's results [tokens, heads, VALUES] and its state after the step."""
    found.append(of.rows("out", one.first + one.count, columns, "out_stride")[one.rows])
    wanted.append(results.flatten(1))
    found += tiles
    wanted += torch.split(state, [part.shape[2] for part in tiles], 2)


def _chunks(of: Operands, one: _Sequence) -> Iterator[slice]:
    """Tokens of each chunk: from a multiple of its size in the sequence to the next."""
    size, before = of.size("CHUNK"), one.length - one.count
    cuts = [0, *(at - before for at in range(before + 1, one.length) if at % size == 0), one.count]
    for begin, end in pairwise(cuts):
        yield slice(begin, end)


def _recurrence_chunks(of: Operands) -> list[Output]:
    """T is compared by what it is: the inverse."""
    heads, chunk = of.size("HEADS"), of.size("CHUNK")
    found: list[torch.Tensor] = []
    wanted: list[torch.Tensor] = []
    for one in _sequences(of):
        if one.count < of.size("LEAST"):
            continue
        given, end = _Operands.of(of, one), one.first + one.count
        of_q, of_k = _factor(of, given.q), _factor(of, given.k)
        found.append(of.view("factors", (end, heads, 2))[one.rows].flatten(1))
        wanted.append(torch.stack([of_q, of_k], -1).flatten(1))
        names = ("weights",) if of.size("IS_SCAN") else ("weights", "inverses")
        stored = {name: of.view(name, (end, heads, chunk))[one.rows] for name in names}
        for own in _chunks(of, one):
            q, k, size = given.q[own] * of_q[own, :, None], given.k[own] * of_k[own, :, None], own.stop - own.start
            sums = given.decay[own].cumsum(0).T
            decays = (sums[:, :, None] - sums[:, None, :]).clamp(max=0).exp()
            made = {"weights": (of.number("scale") * decays * torch.einsum("ihk,jhk->hij", q, k)).tril()}
            a = (decays * torch.einsum("ihk,jhk->hij", k, k) * given.gate[own].T[:, :, None]).tril(-1)
            made["inverses"] = torch.linalg.inv(torch.eye(size, dtype=a.dtype, device=a.device) + a)
            found += [stored[name][own, :, :size].transpose(0, 1) for name in names]
            wanted += [made[name] for name in names]
    return _outputs(found, wanted)


def _chunked_recurrence(of: Operands) -> list[Output]:
    """With T, P and factors as they are given."""
    found: list[torch.Tensor] = []
    wanted: list[torch.Tensor] = []
    heads, values, chunk = of.size("HEADS"), of.size("VALUES"), of.size("CHUNK")
    for one in _sequences(of):
        if one.count < of.size("LEAST"):
            continue
        given, end = _Operands.of(of, one), one.first + one.count
        factors = of.view("factors", (end, heads, 2))[one.rows].double()
        q, k = given.q * factors[..., :1], given.k * factors[..., 1:]
        weights = of.view("weights", (end, heads, chunk))[one.rows].double()
        tiles, s = _state(of, one)
        results = []
        for own in _chunks(of, one):
            size, sums = own.stop - own.start, given.decay[own].cumsum(0)
            change = given.gate[own][..., None] * given.v[own]
            if not of.size("IS_SCAN"):
                seen = sums.exp()[..., None] * torch.einsum("ihk,hkv->ihv", k[own], s)
                t = of.view("inverses", (end, heads, chunk))[one.rows][own, :, :size].double()
                change = torch.einsum("ihj,jhv->ihv", t, given.gate[own][..., None] * (given.v[own] - seen))
            result = of.number("scale") * sums.exp()[..., None] * torch.einsum("ihk,hkv->ihv", q[own], s)
            result = result + torch.einsum("ihj,jhv->ihv", weights[own, :, :size], change)
            results.append(_skipped(of, result, given.v[own]))
            fed = (sums[-1] - sums).exp()[..., None] * change
            s = s * sums[-1].exp()[:, None, None] + torch.einsum("ihk,ihv->hkv", k[own], fed)
        _add(of, one, found, wanted, torch.cat(results), tiles, s, heads * values)
    return _outputs(found, wanted)


def _outputs(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> list[Output]:
    """One output of everything, each part over its magnitude and in rows of its last axis: parts differ in columns."""
    sizes = [float(part.abs().max()) or 1.0 for part in wanted]
    columns = max((part.shape[-1] for part in wanted), default=1)

    def joined(parts: list[torch.Tensor]) -> torch.Tensor:
        rows = [part.double().reshape(-1, part.shape[-1]) / size for part, size in zip(parts, sizes, strict=True)]
        padded = [torch.nn.functional.pad(each, (0, columns - each.shape[1])) for each in rows]
        return torch.cat(padded) if padded else torch.zeros(0, 1)

    return [Output("results", lambda: joined(found), joined(wanted))]


RECURRENCES: Mapping[str, Callable[[Operands], list[Output]]] = {
    "chunked_recurrence": _chunked_recurrence,
    "recurrence": _recurrence,
    "recurrence_chunks": _recurrence_chunks,
    "recurrence_rates": _recurrence_rates,
    "short_convolution": _short_convolution,
}
