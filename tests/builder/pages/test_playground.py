"""The playground of a plan in Chromium: after a slider is moved, its figures are those that Python computes."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from ingot.builder.pages.plan_page import latency_cells, plan_page, rounded
from ingot.planning.formulas import accepted_tokens
from ingot.planning.hardware import find_hardware
from ingot.planning.latency import predict_static
from ingot.planning.load import Load
from ingot.planning.model_shape import ModelShape
from ingot.planning.plan import ServingPlan, make_plan
from ingot.planning.service_levels import LevelBounds
from ingot.planning.step_model import StepModel, Term, Use
from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.truncation_sampling import TokenChoice, choose_token, surviving_tokens
from ingot.validation.report.page import write_page
from tests.builder.pages.browser import cells, choose, facts
from tests.each_case import each_case
from tests.planning.shapes import COUNTED, dense_shape, mixture_shape, subject

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

LEVEL = LevelBounds(words="a test", ttft=0.5, tpot=0.02)
START = Load(32, 1024, 256, drafted_tokens=4, acceptance=0.7)
POSITIONS = {
    "alone": Load(1, 1024, 256, drafted_tokens=4, acceptance=0.7),
    "more than fit": Load(1024, 6144, 1024, drafted_tokens=0, acceptance=0.7),
    "short and cached": Load(96, 64, 16, cached_tokens=32, drafted_tokens=8, acceptance=0.95),
    "long drafts that are all right": Load(8, 2048, 512, drafted_tokens=16, acceptance=1.0),
}


def plan_of(name: str, load: Load = START, devices: int | None = None) -> ServingPlan:
    shapes: dict[str, Callable[[], ModelShape]] = {
        "8B": dense_shape,
        "70B": partial(dense_shape, 80, 8192, 28672, 64),
        "mixture": mixture_shape,
        "counted mixture": partial(mixture_shape, reach=COUNTED),
    }
    return make_plan(
        subject(shapes[name]()), "h100", find_hardware("h100"), load, level=("a test", LEVEL), devices=devices
    )


def move(page: "Page", load: Load) -> None:
    choose(page, "concurrency", load.concurrency)
    choose(page, "prompt", load.prompt_tokens)
    choose(page, "output", load.output_tokens)
    choose(page, "cached", 100 * load.cached_tokens / load.prompt_tokens)
    choose(page, "drafted", load.drafted_tokens)
    choose(page, "acceptance", 100 * load.acceptance)


@pytest.fixture
def page(browser: "Browser") -> "Iterator[Page]":
    opened = browser.new_page()
    failed: list[str] = []
    opened.on("pageerror", lambda error: failed.append(str(error)))
    yield opened
    opened.close()
    assert not failed


def show(page: "Page", plan: ServingPlan, folder: Path) -> None:
    write_page(folder / "page.html", plan_page(plan, {}))
    page.goto((folder / "page.html").as_uri())


@each_case("name", ["8B", "70B", "mixture", "counted mixture"])
def test_figures_are_python_s_at_each_position(page: "Page", tmp_path: Path, name: str) -> None:
    show(page, plan_of(name), tmp_path)
    chosen = plan_of(name).parallelism
    for load in POSITIONS.values():
        move(page, load)
        plan = plan_of(name, load, chosen.devices if chosen else None)
        found = next((each for way, each in plan.alternatives if str(way) == str(chosen)), plan.latency)
        assert found
        shown = facts(page, "latency")
        assert shown["TTFT"] == f"{found.ttft * 1e3:,.1f} ms"
        assert shown["TPOT"] == f"{found.tpot * 1e3:,.2f} ms"
        assert shown["ITL"] == f"{found.itl * 1e3:,.2f} ms"
        assert shown["End to end"] == f"{found.end_to_end:,.2f} s"
        assert shown["Throughput"] == f"{found.tokens_per_second:,.0f} tokens/s"
        assert (shown["Service level"] == "met at the upper end of the interval") == (not LEVEL.failures(found.upper))
        term = max(plan.step_model.terms(load.average_step(found.running)), key=lambda each: each.seconds)
        if str(plan.parallelism) == str(chosen):
            assert shown["Bound by"].startswith(f"{term.resource} in {term.name}, ")


def test_the_curve_has_the_sweep_and_memory_the_sequences_of_the_plan(page: "Page", tmp_path: Path) -> None:
    load = POSITIONS["short and cached"]
    show(page, plan_of("8B"), tmp_path)
    move(page, load)
    plan = plan_of("8B", load)
    rows = [[f"{one.load.concurrency}", *latency_cells(one)] for one in plan.sweep]
    assert [[*row[:3], *row[4:]] for row in cells(page, "curve")] == rows
    assert plan.parallelism
    assert facts(page, "memory-panel")["Sequences that fit"] == f"{plan.parallelism.sequences:,.0f}"
    title = page.locator("#memory-panel svg title").first.text_content()
    assert title
    assert f"weights {plan.memory.weights / 1e9:,.2f} GB" in title


def test_every_way_to_share_a_mixture_has_the_figures_of_its_plan(page: "Page", tmp_path: Path) -> None:
    show(page, plan_of("mixture"), tmp_path)
    by_way = {row[0]: row for row in cells(page, "ways")}
    assert len(by_way) >= 8
    for devices in (1, 2, 8, 16):
        plan = plan_of("mixture", devices=devices)
        assert plan.parallelism
        assert plan.latency
        for way, found in plan.alternatives or ((plan.parallelism, plan.latency),):
            row = by_way[str(way)]
            assert row[2:5] == list(latency_cells(found)[:3])
            assert row[1] == f"{way.sequences:,.0f}"
    assert by_way["one device"][6] == "0.0%"
    assert float(by_way["8 devices: tensor parallel over 8"][6].rstrip("%")) > 1


def test_static_batches_and_one_at_a_time(page: "Page", tmp_path: Path) -> None:
    plan = plan_of("8B", replace(START, drafted_tokens=0, acceptance=0.0))
    show(page, plan, tmp_path)
    choose(page, "longest", 4)
    rows = cells(page, "batching")
    for row, most, longest in ((rows[0], 1.0, 1.0), (rows[1], plan.most_sequences, 4.0)):
        found = predict_static(plan.step_model, plan.load, most, longest)
        assert row[1:] == list(latency_cells(found)[:3])
    assert plan.latency
    assert rows[2][1:] == list(latency_cells(plan.latency)[:3])


def test_drafts_cost_what_the_slider_says(page: "Page", tmp_path: Path) -> None:
    show(page, plan_of("8B"), tmp_path)
    model = plan_of("8B").step_model
    for cost in (0, 10, 50):
        choose(page, "cost", cost)
        plain = model.seconds(replace(START, drafted_tokens=0).decode_step())
        verifying, tau = model.seconds(START.decode_step()), accepted_tokens(0.7, 4)
        shown = facts(page, "speculation")
        assert shown["Speedup"] == f"{tau * plain / (verifying + 4 * cost / 100 * plain):.2f}x"
        assert shown["Tokens of a step"] == f"{tau:.2f}"
        assert shown["Verifying step"] == f"{verifying * 1e3:.2f} ms"


def test_measured_steps_are_those_of_the_plan_s_own_devices_alone(page: "Page", tmp_path: Path) -> None:
    terms = (Term("rows", (Use("overhead", "rows", 1e-4), Use("compute", "rows", 2e-4, ((1, 0.1),)))),)
    measured = StepModel((Term("steps", (Use("overhead", "steps", 5e-3),)), *terms), "a test", 0.05)
    plan = make_plan(subject(), "h100", find_hardware("h100"), START, measured=measured)
    show(page, plan, tmp_path)
    assert len(cells(page, "ways")) == 1
    assert plan.latency
    assert facts(page, "latency")["TPOT"] == f"{plan.latency.tpot * 1e3:,.2f} ms"


WORDS = ("the", "a", "its", "this", "every", "no", "one", "blue")
SCORES = np.array([3.1, 2.4, 1.7, 1.3, 0.9, 0.2, -0.6, -1.4])


def test_the_token_loop_chooses_what_the_runtime_would(page: "Page", tmp_path: Path) -> None:
    plan = plan_of("8B")
    show(page, plan, tmp_path)
    assert plan.latency
    for temperature, top in ((0.0, 100), (0.7, 90), (1.0, 100), (2.0, 50)):
        choose(page, "temperature", temperature)
        choose(page, "top", top)
        page.get_by_role("button", name="Start over").click()
        for _ in range(14):
            page.get_by_role("button", name="Next token").click()
        choice = TokenChoice.of(SamplingParams(temperature=temperature, top_p=top / 100))
        rows = cells(page, "token-loop")
        assert len(rows) == 12
        for place, row in enumerate(rows):
            uniform = (place * 0.6180339887498949 + 0.35) % 1
            assert row[1] == WORDS[choose_token(SCORES, choice, uniform)]
            assert row[4] == f"{(plan.latency.ttft + place * plan.latency.tpot) * 1e3:,.1f}"
        kept = (
            surviving_tokens(SCORES, SamplingParams(temperature=temperature, top_p=top / 100)) if temperature else [0]
        )
        title = page.locator("#token-loop svg title").first.text_content() or ""
        assert title.count(": 0.0 %") == len(WORDS) - len(kept)
    assert page.evaluate("document.activeElement.textContent") == "Next token"


@each_case("window", [0, 200])
def test_tiles_that_are_computed_are_those_with_a_key_that_a_query_sees(
    page: "Page", tmp_path: Path, window: int
) -> None:
    shape = dense_shape()
    shape = replace(shape, kv=shape.kv.model_copy(update={"window": window}))
    load = Load(32, 1024, 256, cached_tokens=512)
    show(page, make_plan(subject(shape), "h100", find_hardware("h100"), load), tmp_path)
    shown = facts(page, "attention-tiles")
    size = int(shown["A tile"].split(" ")[0])
    query, key = np.mgrid[512:1024, 0:1024]
    sees = (key <= query) & (key > query - (window or 10**9))
    tiles, areas = (
        np.add.reduceat(np.add.reduceat(one.astype(int), range(0, 512, size), 0), range(0, 1024, size), 1)
        for one in (sees, np.ones_like(sees))
    )
    assert shown["Tiles computed"] == f"{(tiles > 0).sum():,} of {tiles.size:,}"
    assert shown["Partly masked"] == f"{((tiles > 0) & (tiles < areas)).sum():,}"
    assert shown["A layer's scores, if stored"] == f"{512 * 1024 * 32 * 2 / 1e6:,.2f} MB"


def test_a_load_that_does_not_fit_says_so(page: "Page", tmp_path: Path) -> None:
    show(page, plan_of("70B"), tmp_path)
    choose(page, "way", 0)
    assert "do not hold" in (page.locator("#latency").text_content() or "")
    choose(page, "way", 3)
    assert facts(page, "latency")["TPOT"]


def test_sliders_are_moved_by_keys_and_say_their_value(page: "Page", tmp_path: Path) -> None:
    show(page, plan_of("8B"), tmp_path)
    page.locator("#concurrency").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("#concurrency").get_attribute("aria-valuetext") == "48"
    assert "tokens a second" in (page.locator("#said").text_content() or "")
    plan = plan_of("8B", replace(START, concurrency=48))
    assert plan.latency
    assert facts(page, "latency")["TPOT"] == f"{plan.latency.tpot * 1e3:,.2f} ms"


def test_round_numbers_end_with_the_limit() -> None:
    assert rounded(20) == [1, 2, 3, 4, 6, 8, 12, 16, 20]
    assert rounded(1) == [1]
