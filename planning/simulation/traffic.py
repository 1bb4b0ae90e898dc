"""Traffic: who sends what and when, as an iterator of requests in order of arrival.

    FILE                      a trace; see traces.py
    poisson:RATE              RATE requests a second, independent of each other
    bursts:RATE:CV            gaps of a gamma distribution whose coefficient of variation is CV; above 1 they are bursts
    diurnal:RATE:PEAK:HOURS   Poisson whose rate swings around RATE up to PEAK, once in HOURS (24)
    at-once                   all at the start

A distribution of arrivals takes the sizes of its requests from `RequestSizes`.
"""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ingot.errors import UsageError, shown
from ingot.planning.simulation.timed_request import TimedRequest
from ingot.planning.simulation.traces import Prompts, RequestLengths, read_trace

_MOST_REQUESTS = 100_000_000
_MOST_TOKENS = 1 << 24
_HOURS = 24.0
_FORMS = "a trace's file, poisson:RATE, bursts:RATE:CV, diurnal:RATE:PEAK[:HOURS] or at-once"


@dataclass(frozen=True, kw_only=True)
class RequestSizes:
    """Lengths of requests of a distribution: log-normal around these medians; a spread of 0 makes all equal to them.

    shared_tokens   further leading tokens, in common with other prompts
    num_prefixes    number of such beginnings; each request has a random one
    """

    prompt_tokens: int = 512
    output_tokens: int = 128
    spread: float = 0.8
    shared_tokens: int = 0
    num_prefixes: int = 1

    def __post_init__(self) -> None:
        for name, least in (("prompt_tokens", 1), ("output_tokens", 1), ("shared_tokens", 0), ("num_prefixes", 1)):
            value = getattr(self, name)
            if not least <= value <= _MOST_TOKENS:
                raise UsageError(f"{name} is {value}; it must be from {least} to {_MOST_TOKENS}")
        if not 0 <= self.spread <= 5:
            raise UsageError(f"spread is {self.spread:g}; it must be from 0 to 5")

    def draw(self, rng: random.Random, line: int, seconds: float) -> TimedRequest:
        """Return a request at a moment, the `line`-th of its load."""
        prompt, output = self._length(rng, self.prompt_tokens), self._length(rng, self.output_tokens)
        if not self.shared_tokens:
            return TimedRequest(seconds, RequestLengths(line, prompt, output))
        # The first block is the shared one, and others, of the same size, are the prompt's own.
        size = self.shared_tokens
        first, own = rng.randrange(self.num_prefixes), self.num_prefixes + line * (prompt // size + 2)
        blocks = (first, *range(own, own + -(-prompt // size)))
        return TimedRequest(seconds, RequestLengths(line, size + prompt, output, blocks), size)

    def _length(self, rng: random.Random, median: int) -> int:
        return max(1, min(_MOST_TOKENS, round(median * rng.lognormvariate(0, self.spread)))) if self.spread else median


@dataclass(frozen=True)
class Traffic:
    """Requests that can be sent again and again, at other rates.

    rate              requests a second on average; 0 where all arrive at once
    shares_prefixes   whether prompts of different requests begin alike
    """

    name: str
    rate: float
    make: Callable[[], Iterator[TimedRequest]]
    shares_prefixes: bool = True

    def __iter__(self) -> Iterator[TimedRequest]:
        return self.make()

    def at(self, rate: float) -> "Traffic":
        """Return the same requests, sent faster or slower, at this rate."""
        assert rate > 0
        assert self.rate > 0
        factor = self.rate / rate

        def requests() -> Iterator[TimedRequest]:
            for each in self.make():
                yield TimedRequest(each.seconds * factor, each.lengths, each.block_tokens)

        return replace(self, rate=rate, make=requests)


def parse_traffic(
    text: str,
    *,
    sizes: RequestSizes = RequestSizes(),
    count: int | None = None,
    context_tokens: int,
    seed: int = 0,
    speed: float = 1.0,
    scale: float = 1.0,
) -> Traffic:
    """Return the load that a text names; see the module.

    count   requests; None: all of a trace, 1,000 of a distribution
    speed   of a trace: 2 sends it in half the time
    scale   of a trace: 1/32 makes prompts and outputs, and blocks with them, as long

    UsageError or DataError, which names what is wrong and what is allowed.
    """
    if count is not None and not 1 <= count <= _MOST_REQUESTS:
        raise UsageError(f"requests is {count}; it must be from 1 to {_MOST_REQUESTS:,}")
    kind, _, rest = text.partition(":")
    if kind not in _KINDS:
        if not Path(text).exists():
            raise UsageError(f"the load {shown(text)} is neither a file nor a distribution; it must be {_FORMS}")
        return _trace(Path(text), count, context_tokens, speed, scale)
    if (speed, scale) != (1.0, 1.0):
        raise UsageError(f"speed and scale are for traces; {text} has a rate and lengths of its own")
    numbers = _numbers(text, rest)
    fewest, most = _KINDS[kind]
    if not fewest <= len(numbers) <= most:
        raise UsageError(f"the load {text} has {len(numbers)} numbers; it must be {_FORMS}")
    gaps = _gaps(kind, numbers)
    rate = numbers[0] if numbers else 0.0

    def requests() -> Iterator[TimedRequest]:
        rng, now = random.Random(seed), 0.0
        for line in range(1, 1 + (count or 1000)):
            now = gaps(rng, now)
            yield _fitted(sizes.draw(rng, line, now), context_tokens)

    return Traffic(text, rate, requests, shares_prefixes=sizes.shared_tokens > 0)


_KINDS = {"poisson": (1, 1), "bursts": (2, 2), "diurnal": (2, 3), "at-once": (0, 0)}


def _numbers(text: str, rest: str) -> list[float]:
    numbers = []
    for part in rest.split(":") if rest else ():
        try:
            number = float(part)
        except ValueError:
            number = math.nan
        if not 0 < number < math.inf:
            raise UsageError(f"the load {text} has {part!r} for a number; it must be above 0")
        numbers.append(number)
    return numbers


def _gaps(kind: str, numbers: list[float]) -> Callable[[random.Random, float], float]:
    """Return the function from the time of one arrival to that of the next."""
    if kind == "poisson":
        return lambda rng, now: now + rng.expovariate(numbers[0])
    if kind == "bursts":
        shape = numbers[1] ** -2
        return lambda rng, now: now + rng.gammavariate(shape, 1 / (numbers[0] * shape))
    if kind == "diurnal":
        return _diurnal(*numbers)
    return lambda rng, now: now


def _diurnal(rate: float, peak: float, hours: float = _HOURS) -> Callable[[random.Random, float], float]:
    """Return gaps of a Poisson process whose rate is a sine, by thinning (Lewis and Shedler 1979)."""
    if not rate <= peak <= 2 * rate:
        raise UsageError(
            f"a diurnal load has a mean rate of {rate:g} and a peak of {peak:g}; the peak must be from {rate:g} to"
            f" {2 * rate:g}, because the rate falls as far below the mean at night"
        )

    def following(rng: random.Random, now: float) -> float:
        while True:
            now += rng.expovariate(peak)
            current = rate + (peak - rate) * math.sin(2 * math.pi * now / (hours * 3600))
            if rng.random() * peak <= current:
                return now

    return following


def _trace(path: Path, count: int | None, context_tokens: int, speed: float, scale: float) -> Traffic:
    for name, value in (("speed", speed), ("scale", scale)):
        if not 1e-6 <= value <= 1e6:
            raise UsageError(f"{name} is {value:g}; it must be from 0.000001 to 1,000,000")
    prompts = Prompts(scale)
    kind, arrivals = read_trace(path, limit=count)
    found = []
    for each in arrivals:
        if not isinstance(each.content, RequestLengths):
            raise UsageError(f"{path} is a log of texts; a simulation needs lengths: a trace of another format")
        lengths = each.content
        if lengths.prompt_tokens and lengths.output_tokens:
            request = TimedRequest(each.seconds / speed, prompts.lengths(lengths), prompts.block_tokens)
            found.append(_fitted(request, context_tokens))
    if not found:
        raise UsageError(f"no request of {path} has a prompt and an output")
    seconds = found[-1].seconds - found[0].seconds
    rate = (len(found) - 1) / seconds if seconds else 0.0
    shares_prefixes = any(each.lengths.blocks for each in found)
    return Traffic(f"{path.name} ({kind})", rate, lambda: iter(found), shares_prefixes)


def _fitted(request: TimedRequest, context_tokens: int) -> TimedRequest:
    """Shorten prompt and output to the context."""
    lengths = request.lengths
    if lengths.prompt_tokens + lengths.output_tokens <= context_tokens:
        return request
    output = min(lengths.output_tokens, max(1, context_tokens // 2))
    prompt = min(lengths.prompt_tokens, context_tokens - output)
    blocks = lengths.blocks[: -(-prompt // request.block_tokens)]
    return replace(request, lengths=RequestLengths(lengths.line, prompt, output, blocks))
