"""`ingot choose` prints the cheapest answer with its commands, writes manifests, and refuses with one error."""

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from ingot.cli.compiler.choose import commands, unserved
from ingot.cli.engine_options import engine_options
from ingot.cli.main import COMMANDS, run
from ingot.pipeline.recipe.load import load_recipe
from ingot.pipeline.targets.table import TARGETS
from ingot.planning.choice.search import choose
from ingot.planning.hardware import find_hardware
from ingot.runtime.options import EngineOptions
from tests.data_paths import FIXTURES
from tests.each_case import each_case
from tests.planning.choice.questions import found, question

Captured = pytest.CaptureFixture[str]
TINY = FIXTURES / "checkpoints" / "llama"
LOAD = ("--load", "poisson:4", "--requests", "20", "--prompt-tokens", "16", "--output-tokens", "8", "--spread", "0.2")
ON = ("--on", "epyc-9654", "--price", "epyc-9654=1.5", "--recipe", "int4-cpu", "--recipe", "fp32-cpu")


def chosen(capsys: Captured, *words: str) -> dict[str, Any]:
    assert run(["choose", str(TINY), *ON, *LOAD, *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_an_answer_has_commands_that_the_command_line_takes_and_is_the_same_again(
    tmp_path: Path, capsys: Captured
) -> None:
    found = chosen(capsys, "--manifests", str(tmp_path / "files"))
    best = found["answers"][0]
    assert best["configuration"]["recipe"] == "fp32-cpu"
    assert best["price_per_hour"] == 1.5 * best["replicas"]
    assert best["at_worst"]["good_share"] >= found["service_level"]["percentile"]
    build, serve = map(shlex.split, best["commands"])
    assert build[:4] == ["ingot", "build", "fp32-cpu", str(TINY)]
    assert serve[:3] == ["ingot", "serve", build[build.index("-o") + 1]]
    written = [list(yaml.safe_load_all(Path(file).read_text())) for file in found["manifests"]]
    assert [each["kind"] for each in written[0]] == ["Deployment", "Service", "HorizontalPodAutoscaler"]
    assert written[-1][0]["groups"][0]["name"] == "ingot-chat"
    again = chosen(capsys)
    assert again["answers"] == found["answers"]
    assert again["num_simulated_requests"] == found["num_simulated_requests"] > 0


@each_case(
    "words",
    [
        ON,
        (*ON, "--drafted", "3", "--acceptance", "0.7"),
        ("--on", "h100"),
        ("--on", "a100", "--recipe", "int4-cuda"),
        ("--on", "l4", "--price", "l4=0.5", "--recipe", "fp16-ort-cuda"),
        (*ON, "--shared-tokens", "64", "--prompt-tokens", "80"),
    ],
)
def test_every_printed_command_is_one_that_its_command_takes(words: tuple[str, ...], capsys: Captured) -> None:
    assert run(["choose", str(TINY), *LOAD, *words, "--json"]) == 0
    answers = json.loads(capsys.readouterr().out)["answers"]
    assert answers
    for answer in answers:
        build, serve = map(shlex.split, answer["commands"])
        hardware = find_hardware(answer["configuration"]["hardware"])
        built = COMMANDS["build"].make_context("build", build[2:]).params
        target = TARGETS[load_recipe(build[2], built["overrides"]).target]
        assert hardware.sm in (*target.sms, *target.sm_choice) or hardware.kind == "cpu"
        served = COMMANDS["serve"].make_context("serve", serve[2:]).params
        EngineOptions(**engine_options(served["settings"], served["speculate"]))  # type: ignore[arg-type]
        assert answer["not_served"] is None


@each_case(
    ("words", "reason"),
    [
        (("--on", "mi300x", "--price", "mi300x=2"), "Ingot's GPU programs are for CUDA, and the row mi300x has no sm"),
        (("--on", "b200", "--price", "b200=4", "--recipe", "int4-cuda"), "no target of `int4-cuda` builds for SM 100"),
    ],
)
def test_what_the_engine_cannot_serve_has_a_reason_and_no_command(
    words: tuple[str, ...], reason: str, tmp_path: Path, capsys: Captured
) -> None:
    given = ["choose", str(TINY), *LOAD, *words, "--manifests", str(tmp_path / "files")]
    assert run(given) == 0
    printed = capsys.readouterr()
    assert reason in " ".join((printed.out + printed.err).split())
    assert "ingot serve" not in printed.out
    assert not (tmp_path / "files").exists()
    assert run([*given, "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["answers"][0]
    assert best["commands"] == []
    assert reason in best["not_served"]


def test_a_replica_of_several_devices_is_not_served() -> None:
    best = choose(found("a100")[:1], question(requests=16)).best
    assert best
    assert unserved(best) == ""
    two = replace(best, configuration=replace(best.configuration, tensor=2))
    assert "runs on one device, and this replica has 2" in unserved(two)
    assert commands(two, "model") == []


def test_the_answer_and_the_next_are_printed_with_what_they_need_to_win(capsys: Captured) -> None:
    assert run(["choose", str(TINY), *ON, *LOAD]) == 0
    printed = capsys.readouterr().out
    for text in ("1 x fp32-cpu on epyc-9654", "$1.50 an hour", "costs the same", "ingot build fp32-cpu", "ingot serve"):
        assert text in printed


def test_a_level_that_nothing_meets_ends_with_the_nearest_and_exit_code_3(capsys: Captured) -> None:
    assert run(["choose", str(TINY), *ON, *LOAD, "--slo", "tpot=0.000000001"]) == 3
    printed = capsys.readouterr().out
    assert "Nothing meets the service level" in printed
    assert "times the bound of" in printed
    assert "a bound on TPOT of" in printed


@each_case(
    ("words", "message"),
    [
        (("--on", "epyc-9654"), "epyc-9654 has no price, and a choice is by cost: give --price epyc-9654=DOLLARS"),
        (("--on", "cpu"), "no row of --on cpu has a price: give --price NAME=DOLLARS"),
        (("--on", "h10"), "h100"),
        (("--on", "h100", "--price", "h100=free"), "--price h100=free: it must be NAME=DOLLARS"),
        (("--on", "h100", "--drafted", "4"), "--drafted 4 needs --acceptance"),
        (("--on", "h100", "--slo", "chatt"), "service level"),
        (("--on", "h100", "--replicas", "2000"), "replicas is 2000; it must be from 1 to 1024"),
    ],
)
def test_what_cannot_be_chosen_is_refused_in_one_message(
    words: tuple[str, ...], message: str, capsys: Captured
) -> None:
    assert run(["choose", str(TINY), *words, *LOAD]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert "Traceback" not in printed
