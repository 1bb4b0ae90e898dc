"""Engines in processes of their own: prepared, loaded once, measured, and failing with their last words."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.adapters.base import Setup
from benchmarks.adapters.ingot import recipe_overrides
from benchmarks.paths import ROOT
from benchmarks.peers import (
    ENGINES,
    PEERS,
    RECIPE_ENGINES,
    Peer,
    PeerFailed,
    PeerProcess,
    Programs,
    Sequences,
    environment_of,
    last_words,
    prepare,
)

from ingot.passes.quantization.smooth_quant import SmoothQuant
from ingot.pipeline.recipe.load import load_recipe
from tests.each_case import each_case

PROGRAMS = Programs()
CHAT = Sequences(batch=2, prompt_tokens=3, max_tokens=9)  # room for 5 steps after the first token


def peer(log: Path, **options: str) -> Peer:
    return Peer("counting", "tests.benchmarks.counting_adapter", "this", {"log": str(log), **options})


def setup(folder: Path) -> Setup:
    found = Setup("tiny", 64, folder, threads=2, max_batch=2, max_tokens=9, pool_tokens=18)
    found.checkpoint.mkdir()
    (found.checkpoint / "config.json").write_text(json.dumps({"vocab_size": 50}))
    return found


def test_a_model_is_prepared_and_loaded_once_and_sequences_decode_until_they_are_full(tmp_path: Path) -> None:
    log, wanted = tmp_path / "log", setup(tmp_path)
    facts = prepare(peer(log), wanted, PROGRAMS)
    assert facts.model == tmp_path / "converted"
    with PeerProcess(peer(log), wanted, facts, PROGRAMS) as process:
        steps = [process.decode(CHAT, 0, count, max_seconds=60.0).steps for count in (3, 2, 1)]
    assert steps == [3, 2, 1]
    start, step = "start 2 3 9", "step"
    assert log.read_text().splitlines() == ["load converted 2", start, *[step] * 5, start, step]


@pytest.mark.parametrize("call", ["load", "start", "step"])
def test_a_failure_ends_with_the_last_words(tmp_path: Path, call: str) -> None:
    failing, wanted = peer(tmp_path / "log", fails=call), setup(tmp_path)
    facts = prepare(failing, wanted, PROGRAMS)
    with pytest.raises(PeerFailed, match=f"RuntimeError: {call} is impossible"):
        with PeerProcess(failing, wanted, facts, PROGRAMS) as process:
            process.decode(CHAT, 0, 1, max_seconds=60.0)


def test_an_engine_that_hangs_is_ended(tmp_path: Path) -> None:
    hanging, wanted = peer(tmp_path / "log", hangs="start"), setup(tmp_path)
    facts = prepare(hanging, wanted, PROGRAMS)
    with PeerProcess(hanging, wanted, facts, PROGRAMS, answer_seconds=3.0) as process:
        with pytest.raises(PeerFailed, match="no answer after 3 s"):
            process.start(CHAT, 0)


def test_whole_requests_are_measured_by_the_engine(tmp_path: Path) -> None:
    log, wanted = tmp_path / "log", setup(tmp_path)
    requests = replace(peer(log), module="tests.benchmarks.counting_requests")
    with PeerProcess(requests, wanted, prepare(requests, wanted, PROGRAMS), PROGRAMS) as process:
        timing = process.decode(CHAT, 0, 3, max_seconds=0.0)
        assert (timing.seconds, timing.cpu_seconds, timing.steps) == (3.0, None, 3)
        assert process.start(CHAT, 1).seconds == 7.0
    assert log.read_text().splitlines() == ["load converted", "prefill 2 3", "decode 2 3 3", "prefill 2 3"]


def test_peers_have_their_memory_in_huge_pages_and_ingot_is_left_as_it_is(tmp_path: Path) -> None:
    wanted = setup(tmp_path)
    theirs = replace(peer(tmp_path / "log"), runs_in="peers")
    programs = Programs(peers_python=Path(sys.executable))
    with PeerProcess(theirs, wanted, prepare(theirs, wanted, programs), programs) as process:
        process.improve_pages()
        assert process.start(CHAT, 0).steps == 1
    assert "hugetlb=1" in environment_of(theirs)["GLIBC_TUNABLES"]
    assert "hugetlb=1" not in environment_of(peer(tmp_path / "log")).get("GLIBC_TUNABLES", "")


def test_only_ik_llama_gets_the_path_of_its_program(tmp_path: Path) -> None:
    programs = Programs(peers_python=Path(sys.executable), ik_llama_bench=tmp_path / "llama-bench")
    commands = {name: programs.command(PEERS[name], setup(tmp_path / name), "serve") for name in folders(tmp_path)}
    assert {name for name, command in commands.items() if str(tmp_path / "llama-bench") in command[-1]} == {
        "ik_llama.cpp-q4_0",
        "ik_llama.cpp-q4_k_m",
    }


def folders(folder: Path) -> list[str]:
    """Engines that run in the peers' environment; makes a folder for each."""
    names = [name for name, row in PEERS.items() if row.runs_in == "peers"]
    for name in names:
        (folder / name).mkdir()
    return names


def test_a_converter_that_fails_is_quoted(tmp_path: Path) -> None:
    with pytest.raises(PeerFailed, match="ValueError: the checkpoint is odd"):
        prepare(peer(tmp_path / "log", fails="prepare"), setup(tmp_path), PROGRAMS)


def test_a_missing_environment_is_named_with_the_command_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(
        PeerFailed, match=r"no-python does not exist; make it with: python -m benchmarks.cpu.setup_peers"
    ):
        prepare(PEERS["openvino"], setup(tmp_path), Programs(peers_python=tmp_path / "no-python"))


@each_case("name", ENGINES)
def test_every_row_has_a_module(name: str) -> None:
    assert (ROOT / (ENGINES[name].module.replace(".", "/") + ".py")).is_file()


@each_case("name", RECIPE_ENGINES)
def test_the_recipes_take_their_options(tmp_path: Path, name: str) -> None:
    options = RECIPE_ENGINES[name].options
    wanted = replace(setup(tmp_path), options=options)
    recipe = load_recipe(str(options["recipe"]), recipe_overrides(wanted))
    assert name.endswith(recipe.cpu.engine)
    smooth_quant = next((made for made in recipe.make_passes() if isinstance(made, SmoothQuant)), None)
    if "activations" not in options:
        assert smooth_quant is None
        return
    assert smooth_quant is not None
    assert (smooth_quant.activations, smooth_quant.alpha) == (options["activations"], "none")
    assert smooth_quant.needs_calibration == (options["activations"] == "static")
    if smooth_quant.needs_calibration:
        text = recipe.calibration_text()
        assert text is not None
        assert text.is_file()


def test_last_words_are_the_last_line_that_is_not_blank() -> None:
    assert last_words("first\n  last \n\n") == "last"
    assert last_words("\n") == "it ended without a message"
