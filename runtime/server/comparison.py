"""Whether a new engine is as fast as the one before it: both complete the same prompts, in turn.

A step of 64 sequences takes longer than a step of one, whatever the artifact is, so times are compared at equal load
alone. While a new engine is on probation, `slowness` is called with both engines taking requests (`Models.shared`), and
a round counts where both had about as many open. The prompts were served lately; the prefix cache is left out, because
the new engine's is empty.
"""

import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ingot.errors import IngotError
from ingot.runtime.async_engine import AsyncEngine
from ingot.runtime.prompts import TokenIds
from ingot.runtime.request_options import RequestOptions
from ingot.runtime.sampling import SamplingParams
from ingot.runtime.server.models import ServedModel

_TOKENS = 16  # of each answer
_ROUNDS = 5  # at most
_SLOWER = 2.0  # times the old engine's time, from which the new one is slow
_UNEQUAL = 8  # loads are equal if they differ by less than one open request in so many
_LOOK_SECONDS = 0.05


@dataclass(frozen=True)
class Pace:
    """Seconds to a first token, without the wait for a place, and for each token after it."""

    first: float
    token: float

    def best(self, other: "Pace | None") -> "Pace":
        """The better time of two rounds each: requests and other programs disturb single ones."""
        return Pace(min(self.first, other.first), min(self.token, other.token)) if other else self

    def slowness(self, before: "Pace") -> str | None:
        """How this is slower than the pace of the engine before; None while it is about as fast."""
        for what, now, then in (("first token", self.first, before.first), ("token", self.token, before.token)):
            if now > _SLOWER * then:
                return f"a {what} takes {1000 * now:.2f} ms, with the engine before {1000 * then:.2f} ms"
        return None


async def require_as_fast(old: ServedModel, new: ServedModel) -> None:
    """Complete prompts with both, before the swap; raises what the new one raises, and IngotError if it is slow.

    Requests slow the old engine alone down here, so a new one that is slow only under load passes.
    """
    if not old.engine.is_healthy:
        await asyncio.gather(*(_complete(new.engine, prompt) for prompt in _prompts(old, new)))
        return
    found = await _slowness(old, new, at_equal_load=False)
    if found:
        raise IngotError(f"it is slow: {found}")


async def slowness(old: ServedModel, new: ServedModel) -> str | None:
    """How the new engine is slower than the old one at equal load, by the best of each in several rounds, or None.

    Both take requests; waits until they have about as many open. Raises what an engine raises.
    """
    return await _slowness(old, new, at_equal_load=True)


async def _slowness(old: ServedModel, new: ServedModel, *, at_equal_load: bool) -> str | None:
    prompts = _prompts(old, new)
    before, now, found = None, None, None
    rounds = _ROUNDS if prompts else 0
    while rounds:
        while at_equal_load and not _have_equal_load(old, new):
            await asyncio.sleep(_LOOK_SECONDS)
        paces = [await _pace(model.engine, prompts) for model in (old, new)]
        if at_equal_load and not _have_equal_load(old, new):
            continue
        before, now = paces[0].best(before), paces[1].best(now)
        found = now.slowness(before)
        if not found:
            return None
        rounds -= 1
    return found


def _have_equal_load(old: ServedModel, new: ServedModel) -> bool:
    """Whether both have about as many open requests, or the old engine no longer takes any."""
    counts = old.gate.num_open, new.gate.num_open
    return abs(counts[0] - counts[1]) <= max(1, min(counts) // _UNEQUAL) or not old.engine.is_healthy


def _prompts(old: ServedModel, new: ServedModel) -> list[TokenIds]:
    """Prompts that were served lately and that both engines can complete."""
    most_tokens = min(old.context_tokens, new.context_tokens) - _TOKENS
    vocab_size = min(old.engine.model.vocab_size, new.engine.model.vocab_size)
    return [prompt for prompt in old.recent_prompts if 0 < len(prompt) < most_tokens and max(prompt) < vocab_size]


async def _pace(engine: AsyncEngine, prompts: Sequence[TokenIds]) -> Pace:
    """Median times of an engine over prompts, which it completes together: under load one alone takes its time."""
    paces = await asyncio.gather(*(_complete(engine, prompt) for prompt in prompts))
    return Pace(statistics.median(pace.first for pace in paces), statistics.median(pace.token for pace in paces))


async def _complete(engine: AsyncEngine, prompt: TokenIds) -> Pace:
    params = SamplingParams(max_tokens=_TOKENS, ignore_eos=True)
    times = (await engine.generate(prompt, params, options=RequestOptions(prefix_cache=False))).metrics
    assert times.ttft_seconds is not None, "a request that ends without an error has a token"
    assert times.tpot_seconds is not None, "and as many as were asked for"
    return Pace(times.ttft_seconds - (times.queue_seconds or 0.0), times.tpot_seconds)
