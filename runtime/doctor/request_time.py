"""Where the time of requests goes, from arrival to last token; what binds each part; the shape of the traffic.

The parts are queue, prefill, decode and paused, for requests with a first token, and the whole time of those that ended
before one: their client left, or their time was over.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from ingot.runtime.doctor.scrapes import ScrapeWindow

_FEWEST = 8  # requests, without which shares say little
_OFTEN = 0.3  # share of the steps
_MUCH = 0.4  # share of the prompts' text, or of the engine's time
_UNEVEN = 8.0  # longest prompts to usual ones
_CHANGED = 2.0  # ratio to earlier
_FEWEST_CHANGED = 20  # observations on both sides
_SHORT_TOKENS, _LONG_TOKENS = 64, 512


@dataclass(frozen=True)
class TimePart:
    """A part of the time of requests that ended: its sum, its share of all, and what binds it."""

    name: str
    seconds: float
    share: float
    bound_by: str


@dataclass(frozen=True)
class RequestTime:
    """The time of the requests of a window. `busy_share` is that of the engine; None where it is not known."""

    requests: float
    queue: float
    prefill: float
    decode: float
    paused: float
    unstarted: float
    busy_share: float | None

    @classmethod
    def of(cls, window: ScrapeWindow) -> Self:
        """Sums in seconds."""
        whole = window.distribution("e2e_request_latency_seconds")
        queue, prefill, decode, paused = (
            window.distribution(f"request_{name}_time_seconds").total
            for name in ("queue", "prefill", "decode", "paused")
        )
        in_decode = min(paused, decode)
        steps = engine_seconds(window)
        return cls(
            requests=whole.count,
            queue=queue,
            prefill=max(0.0, prefill - (paused - in_decode)),
            decode=decode - in_decode,
            paused=paused,
            unstarted=max(0.0, whole.total - queue - prefill - decode),
            busy_share=min(1.0, steps / window.seconds) if window.seconds else None,
        )

    @property
    def total(self) -> float:
        """The sum of all parts."""
        return self.queue + self.prefill + self.decode + self.paused + self.unstarted

    def share(self, part: float) -> float:
        """Share of a part; 0 of too few requests."""
        return part / self.total if self.requests >= _FEWEST and self.total else 0.0


def engine_seconds(window: ScrapeWindow) -> float:
    """Time in which the engine made steps."""
    return sum(window.distribution(f"{kind}_step_seconds").total for kind in ("prefill", "decode"))


def parts_of(window: ScrapeWindow) -> list[TimePart]:
    """The parts of the time, the longest first; none where no request ended."""
    time = RequestTime.of(window)
    found = {
        "queue": (time.queue, _queue_bound(window)),
        "prefill": (time.prefill, _prefill_bound(window)),
        "decode": (time.decode, _decode_bound(window)),
        "paused": (time.paused, "preemptions: too few KV blocks, or more urgent requests"),
        "ended before a first token": (time.unstarted, "clients that left, or deadlines"),
    }
    parts = [
        TimePart(name, seconds, seconds / time.total, bound) for name, (seconds, bound) in found.items() if seconds
    ]
    return sorted(parts, key=lambda part: -part.seconds)


def _queue_bound(window: ScrapeWindow) -> str:
    steps = window.counted("steps") or 1.0
    full = {name: window.counted(f"{name}_full_steps") / steps for name in ("pool", "batch")}
    most = max(full, key=lambda name: full[name])
    if full[most] < _OFTEN:
        return "the steps before, and max_batch_tokens"
    return "free KV blocks" if most == "pool" else "max_sequences"


def _prefill_bound(window: ScrapeWindow) -> str:
    tokens, most = window.distribution("request_prompt_tokens").mean, window.now("max_batch_tokens") or 0.0
    if most and tokens > most:
        return f"{tokens / most:.1f} steps of max_batch_tokens for a prompt of {tokens:.0f} tokens"
    return f"the computing of {tokens:.0f} tokens"


def _decode_bound(window: ScrapeWindow) -> str:
    prompts = window.distribution("prefill_step_seconds")
    if engine_seconds(window) and prompts.total / engine_seconds(window) > 0.5:
        return f"steps that compute prompts too, of {1e3 * prompts.mean:.3g} ms"
    sequences, step = window.distribution("step_sequences").mean, window.distribution("decode_step_seconds").mean
    return f"steps of {sequences:.1f} sequences, of {1e3 * step:.3g} ms"


@dataclass(frozen=True)
class TrafficShape:
    """A shape of the traffic: how it was seen, what binds such traffic, and what suits it."""

    name: str
    seen: str
    cause: str
    action: str


def shapes_of(window: ScrapeWindow) -> list[TrafficShape]:
    """Return the shapes of the traffic; none for too few requests or even traffic."""
    prompts = window.distribution("request_prompt_tokens")
    if prompts.count < _FEWEST:
        return []
    time, pieces = RequestTime.of(window), window.counted("prompt_pieces")
    shared = window.counted("leading_prompt_pieces") / pieces if pieces else 0.0
    found = []
    if is_bursty(time):
        found.append(
            TrafficShape(
                "bursts over idle",
                f"the engine computes {100 * (time.busy_share or 0.0):.0f} % of the time, and requests wait",
                "requests arrive together: the mean rate fits, and its peaks do not",
                "spread arrivals (jitter, a queue before the server), or raise max_sequences and kv_bytes to the peak",
            )
        )
    if shared >= _MUCH:
        found.append(
            TrafficShape(
                "a constant system prompt",
                f"{100 * shared:.0f} % of the prompts' text begins as earlier prompts did",
                "the shared beginning is computed once, if the prefix cache keeps it",
                "keep it first and equal to the byte; with several replicas route by prefix",
            )
        )
    if prompts.p99_ratio >= _UNEVEN:
        found.append(
            TrafficShape(
                "mixed lengths",
                f"the longest prompts are {prompts.p99_ratio:.0f} times the usual ones",
                "short requests share steps with the chunks of long prompts, and wait for them",
                "lower max_batch_tokens for even gaps, or give long prompts a replica or a lower priority",
            )
        )
    elif prompts.quantile(0.5) >= _LONG_TOKENS:
        found.append(
            TrafficShape(
                "few long prompts",
                f"half of the prompts have {prompts.quantile(0.5):.0f} tokens or about that",
                "prefill takes most of the time to a first token, and few sequences fill the KV pool",
                "raise max_batch_tokens, use a prefix cache with tiers, quantize the KV cache",
            )
        )
    elif prompts.quantile(0.9) <= _SHORT_TOKENS:
        found.append(
            TrafficShape(
                "many short prompts",
                f"nine of ten prompts have at most {prompts.quantile(0.9):.0f} tokens",
                "decode takes most of the time: each step reads all weights for few tokens",
                "raise max_sequences while tokens per second grow; quantize weights; try --speculate",
            )
        )
    return found


def is_bursty(time: RequestTime) -> bool:
    """Return whether requests waited for much of their time although the engine idled for much of its own."""
    return time.busy_share is not None and time.busy_share < 0.7 and time.share(time.queue) >= _OFTEN


_COMPARED: Mapping[str, str] = {
    "request_prompt_tokens": "tokens of a prompt",
    "request_generation_tokens": "tokens of an answer",
    "step_sequences": "sequences of a step",
    "time_to_first_token_seconds": "seconds to a first token",
    "inter_token_latency_seconds": "seconds between tokens",
    "request_queue_time_seconds": "seconds in the queue",
}


def changes_of(window: ScrapeWindow) -> list[str]:
    """Describe what differs from the time before the first scrape by a factor of 2 or more."""
    found, past = [], window.history
    for name, text in _COMPARED.items():
        now, then = window.distribution(name), past.distribution(name)
        if min(now.count, then.count) < _FEWEST_CHANGED or not (now.mean and then.mean):
            continue
        if not 1 / _CHANGED < now.mean / then.mean < _CHANGED:
            found.append(f"{text}: {now.mean:.3g} on average, {then.mean:.3g} before")
    rates = [_hit_rate(each) for each in (window, past)]
    if None not in rates and abs((rates[0] or 0.0) - (rates[1] or 0.0)) > _OFTEN:
        found.append(f"prefix cache hits: {100 * (rates[0] or 0):.0f} %, {100 * (rates[1] or 0):.0f} % before")
    return found


def _hit_rate(window: ScrapeWindow) -> float | None:
    queries = window.counted("prefix_cache_queries")
    return window.counted("prefix_cache_hits") / queries if queries else None
