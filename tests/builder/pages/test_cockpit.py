"""The cockpit: the simulator's figures at each position, shown in Chromium; what its server refuses; Ctrl-C ends it."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from ingot.builder.pages import cockpit as cockpits
from ingot.builder.pages.cockpit import CockpitRun, Position, Simulated, cockpit_page, serve_cockpit
from ingot.errors import UsageError
from ingot.planning.plan import PlannedModel
from ingot.planning.service_levels import LevelBounds
from ingot.planning.simulation.deployment import Deployment
from ingot.planning.simulation.traffic import RequestSizes, Traffic, parse_traffic
from ingot.runtime.options import EngineOptions
from tests.builder.pages.browser import SIZES, cells, choose, problems
from tests.each_case import each_case
from tests.planning.shapes import subject
from tests.planning.simulation.engines import LinearTimes, shape_of

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

LEVEL = LevelBounds(words="a test", ttft=0.5, tpot=0.05)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
}
SIZES_OF_REQUESTS = RequestSizes(prompt_tokens=64, output_tokens=8)


def traffic_of(sizes: RequestSizes, count: int | None) -> Traffic:
    return parse_traffic("poisson:20", sizes=sizes, count=count, context_tokens=8192)


def simulated(remade: list[Any] | None = None, **options: Any) -> Simulated:
    deployment = Deployment(shape=shape_of(), times=LinearTimes(), **options)

    def remake(model: PlannedModel, options: EngineOptions, devices: int, acceptance: tuple[float, ...]) -> Deployment:
        assert remade is not None
        remade.append((model, options, devices, acceptance))
        return replace(deployment, options=options, shape=replace(deployment.shape, acceptance=acceptance))

    return Simulated(
        subject=subject(),
        deployment=deployment,
        level=LEVEL,
        source="a test",
        sizes=SIZES_OF_REQUESTS,
        is_trace=False,
        rate=20.0,
        devices=1,
        traffic=traffic_of,
        remake=remake if remade is not None else None,
    )


def frames(found: Simulated, position: Position) -> list[dict[str, Any]]:
    """Serve a run to its end."""
    sent, done = list[dict[str, Any]](), Event()

    def send(frame: dict[str, Any]) -> None:
        sent.append(frame)
        if not frame:
            done.set()

    run = CockpitRun(found, position, send)
    run.start()
    assert done.wait(60)
    run.end()
    return sent


def test_a_run_has_the_figures_of_the_simulator() -> None:
    found = frames(simulated(), Position(rate=40, requests=60, replicas=2, prompt=128, batching=1, prefix=0))
    sizes = replace(SIZES_OF_REQUESTS, prompt_tokens=128)
    options = EngineOptions(batching="static", prefix_cache=False)
    deployment = Deployment(shape=shape_of(), times=LinearTimes(), options=options, replicas=2)
    expected = deployment.run(traffic_of(sizes, 60).at(40), LEVEL)
    assert found[-1] == {}
    figures = found[-2]["figures"]
    assert figures["goodput"] == expected.goodput
    assert figures["ttft"]["p99"] == expected.ttft.p99
    assert figures["num_requests"] == 60
    assert sum(found[-2]["run"]["series"]["first_tokens"]) == pytest.approx(60)


def test_another_model_is_as_large_and_as_exact_as_the_sliders_say() -> None:
    remade: list[Any] = []
    found = simulated(remade)
    found.at(Position(rate=1, requests=1, size=2, weights=4, kv=1, devices=4, drafted=2, acceptance=50))
    (model, _, devices, acceptance) = remade[0]
    first, before = model.shape.matmuls[0], found.subject.shape.matmuls[0]
    assert (devices, acceptance) == (4, (0.5, 0.5))
    assert first.elements == 2 * before.elements
    assert first.bits == pytest.approx(4.5, abs=0.01)
    assert model.shape.kv.dtype == "int8"
    saved = found.subject.shape.matmul_bytes - model.shape.matmul_bytes
    assert model.program.weight_bytes == found.subject.program.weight_bytes - saved


def test_a_run_that_takes_too_long_stops_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cockpits, "MOST_SECONDS", 0.0)
    *_, last, end = frames(simulated(), Position(rate=40, requests=60))
    assert end == {}
    assert last["error"].startswith("stopped after 0 seconds of computing: take fewer requests")


def test_a_run_that_is_ended_sends_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cockpits, "_FRAME_SECONDS", 0.0)
    sent, has_begun, may_go_on = list[dict[str, Any]](), Event(), Event()

    def send(frame: dict[str, Any]) -> None:
        sent.append(frame)
        has_begun.set()
        may_go_on.wait(60)

    run = CockpitRun(simulated(), Position(rate=40, requests=5000), send)
    run.start()
    assert has_begun.wait(60)
    run._is_ended.set()
    may_go_on.set()
    run.end()
    assert len(sent) == 1


def test_sliders_are_those_that_change_the_run() -> None:
    def names(found: Simulated) -> set[str]:
        return {each.name for each in cockpit_page(found).sections[0].controls}

    assert {"rate", "replicas", "prompt", "batching", "drafted"} <= names(simulated())
    assert not {"size", "weights", "kv", "devices"} & names(simulated())
    assert {"size", "weights", "kv", "devices"} <= names(simulated([]))
    assert not {"prompt", "output", "shared"} & names(replace(simulated(), is_trace=True))
    assert names(simulated([])) <= set(Position.model_fields)


def test_a_load_without_a_rate_is_refused() -> None:
    with pytest.raises(UsageError, match="give a load with one, as --load poisson:8"):
        serve_cockpit(replace(simulated(), rate=0.0), print)


@contextmanager
def opened(folder: Path, *arguments: str) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """Start `ingot simulate --open` and yield the page's address."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    command = [sys.executable, "-u", "-m", "ingot", "simulate", str(folder / "config.json"), "--on", "h100"]
    command += ["--load", "poisson:20", "--slo", "ttft=0.5,tpot=0.05", *arguments]
    process = subprocess.Popen([*command, "--open"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        yield process.stdout.readline().split("at ")[1].split(" until")[0], process
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()


def wait_for_run(page: "Page") -> dict[str, str]:
    """Wait until a run is over, and return its figures."""
    page.locator("body[data-state=done]").wait_for(timeout=60_000)
    return {row[0]: row[1] for row in cells(page, "outcome")}


def test_moving_a_slider_changes_the_figures_to_the_simulator_s(browser: "Browser", tmp_path: Path) -> None:
    with opened(tmp_path) as (address, _):
        page = browser.new_page()
        page.goto(address)
        wait_for_run(page)
        shown = move(page, "requests", 100)
        for name, value, arguments in (
            ("rate", 60, ("--load", "poisson:60")),
            ("batching", 1, ("--set", "batching=static")),
            ("drafted", 3, ("--acceptance", "0.7,0.7,0.7")),
        ):
            found, before = move(page, name, value), shown
            figures = simulate(tmp_path, ["--requests", "100", *arguments])
            assert found["Goodput, requests/s"] == f"{figures['goodput']:,.2f}"
            assert found["TTFT p99, ms"] == f"{figures['ttft']['p99'] * 1e3:,.1f}"
            assert found["ITL p99, ms"] == f"{figures['itl_p99'] * 1e3:,.1f}"
            assert found["Utilization"] == f"{figures['busy_share']:.0%}"
            shown = move(page, name, {"rate": 20, "batching": 0, "drafted": 0}[name])
            assert shown == before != found
        for width, scheme in SIZES:
            assert problems(browser, address, width, scheme, "#outcome table") == []
        page.close()


def move(page: "Page", name: str, value: float) -> dict[str, str]:
    """Move a slider, and return the figures of the run that follows."""
    page.evaluate("document.body.dataset.state = 'moved'")
    choose(page, name, value)
    return wait_for_run(page)


def simulate(folder: Path, arguments: list[str]) -> dict[str, Any]:
    """Return the figures that the command line prints."""
    command = [sys.executable, "-m", "ingot", "simulate", str(folder / "config.json"), "--on", "h100", "--json"]
    command += ["--slo", "ttft=0.5,tpot=0.05"]
    if "--load" not in arguments:
        command += ["--load", "poisson:20"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)["figures"]
    return found


def ask(address: str, method: str = "GET", path: str = "", body: str = "", **headers: str) -> tuple[int, str]:
    parts = urlsplit(address)
    assert parts.hostname == "127.0.0.1"
    connection = HTTPConnection(parts.hostname, parts.port or 0, timeout=60)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path if path.startswith("/") else parts.path + path, body or None, named)
    answer = connection.getresponse()
    found = answer.status, answer.read().decode()
    connection.close()
    return found


VALID = '{"rate": 50, "requests": 50}'
REFUSED = {
    "another token": (("GET", "/wrong/"), {}, 404, "the address of the cockpit is the one that was printed"),
    "a run by another token": (("POST", "/wrong/run", VALID), {}, 404, "the one that was printed"),
    "a rebound name": (("GET",), {"Host": "evil.example"}, 403, "evil.example"),
    "another origin": (("POST", "run", VALID), {"Origin": "http://evil.example"}, 403, "evil.example"),
    "a long body": (("POST", "run", "x" * 5000), {}, 413, "more than 4096 bytes"),
    "no JSON": (("POST", "run", "{"), {}, 400, "the position is not valid"),
    "a rate of zero": (("POST", "run", '{"rate": 0, "requests": 5}'), {}, 400, "rate"),
    "too many requests": (("POST", "run", '{"rate": 5, "requests": 5001}'), {}, 400, "less than or equal to 5000"),
    "an unknown slider": (("POST", "run", '{"rate": 5, "requests": 5, "seed": 1}'), {}, 400, "seed"),
}


def test_the_server_refuses_what_is_not_its_page_s(tmp_path: Path) -> None:
    with opened(tmp_path) as (address, _):
        for name, (arguments, headers, status, words) in REFUSED.items():
            found, text = ask(address, *arguments, **headers)
            assert (found, words in text) == (status, True), (name, found, text)
        status, text = ask(address, "POST", "run", VALID)
        assert status == 200
        assert json.loads(text.splitlines()[-1])["figures"]["num_requests"] == 50
        status, text = ask(address, "POST", "run", '{"rate": 5, "requests": 5, "size": 100}')
        assert "does not fit" in json.loads(text)["error"]


@each_case("flag", ["--json", "--capacity", "--html=page.html"])
def test_open_goes_with_no_other_output(flag: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    command = [sys.executable, "-m", "ingot", "simulate", str(tmp_path / "config.json"), "--on", "h100"]
    command += ["--load", "poisson:8", "--open", flag]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "leave out --html, --json and --capacity" in done.stdout + done.stderr
