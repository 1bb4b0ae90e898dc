"""What a page shows of a simulated run is what the run's own figures say, in bounded memory."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ingot.builder.pages import recording as recordings
from ingot.builder.pages.recording import SERIES, Recording, Series
from ingot.builder.pages.simulation_page import simulation_page
from ingot.planning.service_levels import LevelBounds
from ingot.planning.simulation.deployment import Deployment
from ingot.planning.simulation.disaggregation import ReplicaPools
from ingot.planning.simulation.figures import Figures
from ingot.planning.simulation.replica import EndedRequest
from ingot.planning.simulation.simulated_tiers import PCIE
from ingot.planning.simulation.traffic import RequestSizes, parse_traffic
from ingot.runtime.options import EngineOptions
from ingot.validation.report.page import write_page
from tests.builder.pages.browser import cells, choose, facts
from tests.each_case import each_case
from tests.planning.simulation.engines import KV, LinearTimes, shape_of

if TYPE_CHECKING:
    from playwright.sync_api import Browser

LEVEL = LevelBounds(words="a test", ttft=0.5, tpot=0.05)
SIZES = RequestSizes(prompt_tokens=200, output_tokens=30, shared_tokens=64, num_prefixes=2)
DEPLOYMENTS = {
    "lengths alone": Deployment(shape=shape_of(), times=LinearTimes()),
    "preemptions": Deployment(shape=shape_of(num_blocks=90), times=LinearTimes()),
    "static batches": Deployment(shape=shape_of(), times=LinearTimes(), options=EngineOptions(batching="static")),
    "drafts": Deployment(shape=shape_of(acceptance=(0.8, 0.6)), times=LinearTimes()),
    "host tier": Deployment(
        shape=shape_of(num_blocks=150), times=LinearTimes(), options=EngineOptions(kv_host_bytes=KV.block_bytes * 400)
    ),
    "three replicas": Deployment(shape=shape_of(), times=LinearTimes(), replicas=3),
}


def record(deployment: Deployment, count: int = 120, rate: float = 30) -> tuple[Recording, Figures, list[EndedRequest]]:
    traffic = parse_traffic(f"poisson:{rate}", sizes=SIZES, count=count, context_tokens=8192)
    recording, ended = Recording(), list[EndedRequest]()

    def on_end(each: EndedRequest) -> None:
        recording.end(each)
        ended.append(each)

    found = replace(deployment, watch=recording.watch).run(traffic, LEVEL, on_end)
    assert found == deployment.run(traffic, LEVEL)
    return recording, found, ended


def total(recording: Recording, name: str) -> float:
    return sum(each[SERIES.index(name)] for each in recording.series.sums)


@each_case("name", sorted(DEPLOYMENTS))
def test_sums_are_those_of_the_figures_and_recording_changes_nothing(name: str) -> None:
    recording, found, ended = record(DEPLOYMENTS[name])
    outputs = sum(each.completion.metrics.num_output_tokens for each in ended if each.completion)
    prompts = sum(each.completion.prompt_tokens - each.completion.cached_tokens for each in ended if each.completion)
    replicas = DEPLOYMENTS[name].replicas
    assert total(recording, "preemptions") == pytest.approx(found.num_preemptions)
    assert total(recording, "busy") <= replicas * found.seconds
    if not found.num_preemptions:
        assert recording.num_steps == found.num_steps
        assert total(recording, "prompt_tokens") == pytest.approx(prompts)
        assert total(recording, "output_tokens") == pytest.approx(outputs - found.num_finished)
        hits = sum(each.completion.cached_tokens for each in ended if each.completion)
        assert total(recording, "hit_tokens") + total(recording, "restored_tokens") == pytest.approx(hits)
        assert (total(recording, "restored_tokens") > 0) == (name == "host tier")
    assert recording.num_blocks == replicas * DEPLOYMENTS[name].shape.num_blocks
    assert (found.num_preemptions > 0) == (name == "preemptions")


@each_case("name", sorted(DEPLOYMENTS))
def test_the_life_of_a_request_has_its_own_times(name: str) -> None:
    recording, _, ended = record(DEPLOYMENTS[name])
    assert len(recording.lives) == len(ended)
    for each in ended:
        assert each.completion
        life, times = recording.lives[each.request.lengths.line], each.completion.metrics
        assert life.arrival == times.arrival_seconds
        assert life.spans[0][1] - life.arrival == pytest.approx(times.queue_seconds, abs=1e-9)
        assert life.spans[-1][2] == pytest.approx(times.finish_seconds)
        assert all(begin[2] <= end[1] + 1e-9 for begin, end in zip(life.spans, life.spans[1:], strict=False))
        first = next(span for span in life.spans if span[0] == "decode") if times.num_output_tokens > 1 else None
        assert first is None or times.first_token_seconds is not None
        assert first is None or life.preemptions or first[1] >= times.first_token_seconds - 1e-9  # type: ignore[operator]


def test_pools_record_a_request_on_both_replicas() -> None:
    deployment = Deployment(shape=shape_of(), times=LinearTimes(), disaggregation=ReplicaPools(1, 2, PCIE))
    recording, _, _ = record(deployment, count=40, rate=10)
    life = next(each for each in recording.lives.values() if each.output_tokens > 4)
    assert {span[4] for span in life.spans if span[0] == "prompt"} == {0}
    assert {span[4] for span in life.spans if span[0] == "decode"} <= {1, 2}
    assert recording.num_blocks == 3 * 2000


def test_an_idle_engine_keeps_its_blocks_for_later_prompts() -> None:
    recording, found, _ = record(DEPLOYMENTS["lengths alone"], count=30, rate=0.5)
    assert found.busy_share < 0.5
    at = SERIES.index("cached_blocks")
    kept = [each[at] for each in recording.series.sums[len(recording.series.sums) // 2 : -1]]
    assert kept[0] > 0
    assert all(later > 0.8 * earlier for earlier, later in pairwise(kept))


def test_series_keep_their_sums_when_bins_are_joined() -> None:
    series = Series(0.5)
    for step in range(1000):
        series.spread(step * 0.7, step * 0.7 + 0.6, [(0, 0.6), (3, 6.0)])
    assert len(series.sums) <= recordings.MOST_BINS
    assert sum(each[0] for each in series.sums) == pytest.approx(600)
    assert sum(each[3] for each in series.sums) == pytest.approx(6000)
    assert series.sums[3][0] / series.width == pytest.approx(6 / 7, rel=0.05)
    series.spread(800.0, 800.0, [(8, 1.0)])
    assert sum(each[8] for each in series.sums) == 1


def test_a_recording_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recordings, "MOST_REQUESTS", 50)
    monkeypatch.setattr(recordings, "MOST_STEPS", 20)
    recording, found, _ = record(DEPLOYMENTS["preemptions"], count=400)
    shown = recording.as_json()
    assert len(recording.lives) == shown["num_kept"] == 50
    assert shown["num_requests"] == 400
    assert len(shown["steps"]) == 20
    assert len(shown["requests"]) == 24
    assert len(shown["moments"]) <= 25
    assert shown["num_steps"] >= found.num_steps - 1
    assert max(each["preemptions"] for each in shown["requests"]) > 0


def test_the_page_shows_the_figures_of_the_run(browser: "Browser", tmp_path: Path) -> None:
    recording, found, ended = record(DEPLOYMENTS["preemptions"])
    write_page(tmp_path / "page.html", simulation_page("a test", "poisson", LEVEL, found, [], "a test", recording))
    page = browser.new_page()
    page.goto((tmp_path / "page.html").as_uri())
    by_line: dict[int, Any] = {each.request.lengths.line: each.completion for each in ended}
    rows: Sequence[Sequence[str]] = cells(page, "life")
    assert len(rows) == 24
    for row in rows:
        done = by_line[int(row[0])]
        assert row[1:4] == [f"{done.prompt_tokens}", f"{done.cached_tokens}", f"{done.metrics.num_output_tokens}"]
        assert row[5] == f"{done.metrics.queue_seconds * 1e3:,.1f}"
        assert row[9] == f"{done.metrics.num_preemptions}"
    for place, seconds in enumerate(recording.moments):
        choose(page, "moment", seconds)
        assert facts(page, "table-panel")["Moment"] == f"{seconds:.3f} s"
        assert page.locator("#table-panel rect").count() == 90
        assert place < 25
    page.close()
