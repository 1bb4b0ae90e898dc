"""Compare a new engine with the one before it: how fast it is, and how it answers.

Speed: both complete the same prompts, in turn. A step of 64 sequences takes longer than a step of one, whatever the
artifact is, so times are compared at equal load alone. While a new engine is on probation, `slowness` is called with
both engines taking requests (`Models.shared`), and a round counts where both had about as many open. The prompts were
served lately; the prefix cache is left out, because the new engine's is empty.

Answers: the old engine continues lately served prompts by sampling, both score each token of these texts, and the
divergence of their next-token distributions is averaged. Two quantizations of one model differ little, and a model with
a layer in the wrong place much, though it may have passed its own gates: these compare it with its own checkpoint.
"""

import asyncio
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ingot.artifact import Artifact
from ingot.errors import IngotError
from ingot.runtime.asking.outputs import SampledToken
from ingot.runtime.asking.prompts import TokenIds
from ingot.runtime.asking.request_options import RequestOptions
from ingot.runtime.asking.sampling_params import MAX_LOGPROBS, SamplingParams
from ingot.runtime.hosting.async_engine import AsyncEngine
from ingot.runtime.server.models.served_models import ServedModel

_TOKENS = 16  # of each answer
_ROUNDS = 5  # at most
_SLOWER = 2.0  # times the old engine's time, from which the new one is slow
_UNEQUAL = 8  # loads are equal if they differ by less than one open request in so many
_LOOK_SECONDS = 0.05

_SCORED_TOKENS = 128  # most of a prompt, its last ones: each costs a sort of the vocabulary
_SAMPLED_TOKENS = 32  # after each
_TEXTS = 8  # those without a prompt that was served begin with nothing
_ERRORS = 2.0  # standard errors between the mean divergence and the end of its interval
_GATE = "kl_mean"
_KL = 0.1  # nats, for an artifact without a gate on it
_MOST_KL = 0.25
_LEAST_PROBABILITY = 1e-9


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


@dataclass(frozen=True)
class AnswerDivergence:
    """Mean KL divergence of two engines' next-token distributions, estimated over the same positions, in nats.

    low   lower end of the mean's 95 % interval
    """

    mean: float
    low: float
    num_tokens: int
    num_texts: int

    @classmethod
    def of(cls, texts: Sequence[Sequence[float]]) -> "AnswerDivergence":
        """Average the divergences at the positions of each text."""
        values = [value for text in texts for value in text]
        mean = statistics.fmean(values)
        error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf
        return cls(mean, mean - _ERRORS * error, len(values), len(texts))


async def change_of_answers(old: ServedModel, new: ServedModel) -> str | None:
    """Describe how the new engine's answers differ from the old one's by more than quantization; None if they do not.

    Raises what an engine raises.
    """
    if await asyncio.to_thread(lambda: old.tokenizer.vocabulary() != new.tokenizer.vocabulary()):
        return "it has another vocabulary than the artifact that is served, so their answers cannot be compared"
    found = await _divergence(old, new)
    limit = most_divergence(old.artifact, new.artifact)
    if found.low <= limit:
        return None
    return (
        f"its answers differ from those of the artifact that is served: a mean KL divergence of {found.mean:.3g} nats"
        f" (at least {found.low:.3g}) over {found.num_tokens} tokens of {found.num_texts} texts, and at most"
        f" {limit:.3g} is allowed"
    )


def most_divergence(*artifacts: Artifact | None) -> float:
    """Return the greatest mean divergence, in nats, of artifacts of one model.

    Each may diverge from the checkpoint as far as its gate on kl_mean allows, and independent errors add up in it.
    """
    return sum(map(_own_limit, artifacts))


def _own_limit(artifact: Artifact | None) -> float:
    gates = artifact.manifest.gates if artifact else ()
    limits = [gate.limit for gate in gates if gate.name == _GATE and gate.bound == "max" and not gate.advisory]
    return min(max(0.0, min(limits)), _MOST_KL) if limits else _KL


async def _divergence(old: ServedModel, new: ServedModel) -> AnswerDivergence:
    """Return the larger of two estimates: by the most likely tokens at all positions, and by the sampled tokens.

    The first has little noise, but sees little of flat distributions; the second is right on average for all.
    """
    recent = [tokens[-_SCORED_TOKENS:] for tokens in _prompts(old, new, _SAMPLED_TOKENS)]
    starts = [*recent, *[[old.engine.model.bos_token_id or 0]] * (_TEXTS - len(recent))]
    texts = await asyncio.gather(*(_continued(old.engine, list(start), seed) for seed, start in enumerate(starts)))
    scores = [await asyncio.gather(*(_scored(each.engine, text) for text in texts)) for each in (old, new)]
    pairs = [[*zip(*both, strict=True)] for both in zip(*scores, strict=True)]
    known = [[divergence(*pair) for pair in of_text] for of_text in pairs]
    sampled = [
        [one.logprob - other.logprob for one, other in of_text[len(start) - 1 :]]
        for start, of_text in zip(starts, pairs, strict=True)
    ]
    return max(AnswerDivergence.of(known), AnswerDivergence.of(sampled), key=lambda found: found.low)


async def _continued(engine: AsyncEngine, start: list[int], seed: int) -> list[int]:
    """Return a text and tokens that the engine samples after it by their probabilities."""
    room = engine.model.context_tokens - len(start) - 2
    params = SamplingParams(max_tokens=max(1, min(_SAMPLED_TOKENS, room)), temperature=1.0, seed=seed, ignore_eos=True)
    done = await engine.generate(start, params, options=RequestOptions(prefix_cache=False))
    return [*start, *done.token_ids]


async def _scored(engine: AsyncEngine, text: list[int]) -> tuple[SampledToken, ...]:
    """Return the most likely tokens at each position of a text from the second on."""
    top = min(MAX_LOGPROBS, engine.model.vocab_size)
    params = SamplingParams(max_tokens=1, prompt_logprobs=top, ignore_eos=True)
    found = (await engine.generate(text, params, options=RequestOptions(prefix_cache=False))).prompt_logprobs
    assert found is not None, "they were asked for"
    return found


def divergence(old: SampledToken, new: SampledToken) -> float:
    """Return the least KL divergence, in nats, of two distributions whose most likely tokens are known.

    Tokens in both lists count alone. The old one's other known tokens are one group, which has in the new distribution
    at most as much as its least likely known token for each; all that is left is another group. The share of the two
    groups that diverges least is taken.
    """
    p, q = _probabilities(old), _probabilities(new)
    both = [token for token in p if token in q]
    known = sum(p[token] * math.log(p[token] / q[token]) for token in both)
    others = [p[token] for token in p if token not in q]
    p_known, p_left = sum(others), max(0.0, 1 - sum(p.values()))
    q_left = max(_LEAST_PROBABILITY, 1 - sum(q[token] for token in both))
    share = p_known / (p_known + p_left) if p_known + p_left else 0.0
    q_known = min(len(others) * min(q.values()), q_left * share)
    return max(0.0, known + _term(p_known, q_known) + _term(p_left, q_left - q_known))


def _probabilities(token: SampledToken) -> Mapping[int, float]:
    """Return the probabilities of the most likely tokens; those that are too small to count have the least one."""
    return {each.token_id: max(math.exp(each.logprob), _LEAST_PROBABILITY) for each in token.top}


def _term(p: float, q: float) -> float:
    return p * math.log(p / max(q, _LEAST_PROBABILITY)) if p > _LEAST_PROBABILITY else 0.0


async def require_as_fast(old: ServedModel, new: ServedModel) -> None:
    """Complete prompts with both, before the swap; raises what the new one raises, and IngotError if it is slow.

    Requests slow the old engine alone down here, so a new one that is slow only under load passes.
    """
    if not old.serves:
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


def _prompts(old: ServedModel, new: ServedModel, room: int = _TOKENS) -> list[TokenIds]:
    """Prompts that were served lately and that both engines can continue by `room` tokens."""
    most_tokens = min(old.context_tokens, new.context_tokens) - room
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
