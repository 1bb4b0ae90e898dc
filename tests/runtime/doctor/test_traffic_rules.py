"""Faults of traffic and clients are named, from engines under load and from counters of a server."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from ingot.runtime.doctor import ObservedFacts, Scrape, ScrapeWindow, diagnose
from ingot.runtime.engine.engine import Engine
from tests.runtime.doctor.loads import Clock, Load, TimedExecutor, serve
from tests.runtime.doctor.test_diagnosis import HEALTHY, healthy

_LOAD = Load(num_requests=60, per_second=20, prompt_tokens=(20, 40), output_tokens=(20, 40))


def window(after: str, before: str = "", seconds: float | None = 5.0) -> ScrapeWindow:
    """Return what was counted between two texts, the first of which may be empty."""
    earlier = Scrape.parse(before, "before") if before else Scrape()
    return ScrapeWindow(earlier, Scrape.parse(after, "after"), seconds)


def names(found: ScrapeWindow) -> list[str]:
    """Findings without those of the machine."""
    return [each.name for each in diagnose(ObservedFacts(found))]


def served(load: Load, executor: TimedExecutor, clock: Clock, **options: int) -> ScrapeWindow:
    """A window in which an engine served a load, after a few requests."""
    with Engine(executor, clock=clock, **options) as engine:  # type: ignore[arg-type]
        before = serve(engine, clock, replace(load, num_requests=10), random.Random(1))
        started = clock.now
        return window(serve(engine, clock, load, random.Random(2)), before, clock.now - started)


def small_chunks() -> ScrapeWindow:
    """Prompts of hundreds of tokens in steps of sixteen."""
    clock = Clock()
    executor = TimedExecutor(clock, num_blocks=4096, max_batch_tokens=16)
    return served(replace(_LOAD, per_second=2, prompt_tokens=(300, 500)), executor, clock, max_sequences=8)


def interrupted_streams() -> ScrapeWindow:
    """Streams, among which prompts of a thousand tokens are computed as a whole."""
    clock = Clock()
    long = iter(range(10**6))

    def prompt(rng: random.Random, length: int) -> list[int]:
        return [rng.randrange(1, 256) for _ in range(3500 if next(long) % 2 == 0 else length)]

    load = replace(_LOAD, prompt=prompt, output_tokens=(60, 120), per_second=6)
    return served(
        load, TimedExecutor(clock, num_blocks=4096, max_batch_tokens=4096, context_tokens=4096), clock, max_sequences=32
    )


def standing_still() -> ScrapeWindow:
    """Two of the steps take seconds."""
    clock = Clock()

    class Pausing(TimedExecutor):
        steps = 0

        def forward(self, batch):  # type: ignore[no-untyped-def]
            self.steps += 1
            self.cold_seconds = 2.0 if self.steps in (400, 450) else 0.0
            return super().forward(batch)

    return served(replace(_LOAD, num_requests=100), Pausing(clock, num_blocks=4096), clock, max_sequences=32)


def preempting_pool() -> ScrapeWindow:
    """Answers that grow in a pool which holds a few of them, without a tier below it."""
    clock = Clock()
    load = Load(num_requests=60, per_second=5, prompt_tokens=(8, 16), output_tokens=(60, 100))
    return served(load, TimedExecutor(clock, num_blocks=40, block_tokens=4), clock, max_sequences=6)


def filled_context() -> ScrapeWindow:
    """Answers that only the context ends."""
    clock = Clock()
    context = TimedExecutor(clock).model.context_tokens
    load = Load(num_requests=10, per_second=1, prompt_tokens=(8, 16), output_tokens=(10 * context, 10 * context))
    return served(load, TimedExecutor(clock, num_blocks=4096), clock, max_sequences=8)


def bursts() -> ScrapeWindow:
    """All requests at once, in a window most of which is idle."""
    clock = Clock()
    found = served(replace(_LOAD, per_second=10_000), TimedExecutor(clock, num_blocks=4096), clock, max_sequences=4)
    assert found.seconds
    return replace(found, seconds=4 * found.seconds)


def counted(text: str, seconds: float = 5.0, base: str = HEALTHY) -> Callable[[], ScrapeWindow]:
    """A healthy engine, and counters of its server."""
    return lambda: window(base + text, seconds=seconds)


_ANSWERS = 'ingot_http_answers_total{path="/v1/completions",status="200"} 40\n'
FAULTS: dict[str, Callable[[], ScrapeWindow]] = {
    "small-chunks": small_chunks,
    "prompts-interrupt-streams": interrupted_streams,
    "engine-stands-still": standing_still,
    "kv-pool-preempts": preempting_pool,
    "answers-fill-context": filled_context,
    "bursts": bursts,
    "clients-leave": counted("ingot_clients_left_total 20\n"),
    "client-errors": counted(_ANSWERS + 'ingot_http_answers_total{path="/v1/completions",status="400"} 30\n'),
    "slow-readers": counted("ingot_send_seconds_total 20\ningot_open_requests 4\n"),
    "threads-under-cores": counted("ingot:compute_threads 2\ningot_usable_cores 4\n", seconds=0.001),
    "prefix-cache-off": counted(
        "ingot:prefix_cache_enabled 0\ningot_prompt_pieces_total 500\ningot_leading_prompt_pieces_total 400\n"
    ),
    "slow-disk-tier": counted("ingot:kv_disk_block_seconds 0.5\ningot:kv_recomputed_prefixes_total 20\n"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_traffic_is_named_first(name: str) -> None:
    found = diagnose(ObservedFacts(FAULTS[name]()))
    others = [each for each in found if each.name not in ("batch-full", "uneven-latency", "kv-pool-full")]
    assert others
    assert others[0].name == name, [(each.name, each.weight, dict(each.numbers)) for each in found]
    assert others[0].numbers
    assert others[0].action


@pytest.mark.parametrize(
    "text",
    [
        "ingot_clients_left_total 3\n",
        _ANSWERS + 'ingot_http_answers_total{path="/v1/completions",status="400"} 3\n',
        _ANSWERS + 'ingot_http_answers_total{path="/v1/completions",status="429"} 7\n',
        'ingot_http_answers_total{path="/health",status="404"} 900\n',
        "ingot_send_seconds_total 0.5\ningot_open_requests 4\n",
        "ingot:compute_threads 4\ningot_usable_cores 4\n",
        "ingot:kv_disk_block_seconds 1e-7\ningot:kv_recomputed_prefixes_total 20\n",
    ],
)
def test_a_little_of_it_is_healthy(text: str) -> None:
    assert names(window(HEALTHY + text)) == []


def test_the_context_that_answers_fill_is_not_named_for_short_answers() -> None:
    assert "answers-fill-context" not in names(window(healthy(5)))
