"""Engines in processes of their own: prepared, loaded once, measured, and failing with their last words."""

import json
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
    Sequences,
    last_words,
    prepare,
)

from ingot.passes.quantization.smooth_quant import SmoothQuant
from ingot.pipeline.recipe.load import load_recipe
from tests.each_case import each_case

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
    facts = prepare(peer(log), wanted, Path("none"))
    assert facts.model == tmp_path / "converted"
    with PeerProcess(peer(log), wanted, facts, Path("none")) as process:
        steps = [process.decode(CHAT, 0, count, max_seconds=60.0).steps for count in (3, 2, 1)]
    assert steps == [3, 2, 1]
    start, step = "start 2 3 9", "step"
    assert log.read_text().splitlines() == ["load converted 2", start, *[step] * 5, start, step]


@pytest.mark.parametrize("call", ["load", "start", "step"])
def test_a_failure_ends_with_the_last_words(tmp_path: Path, call: str) -> None:
    failing, wanted = peer(tmp_path / "log", fails=call), setup(tmp_path)
    facts = prepare(failing, wanted, Path("none"))
    with pytest.raises(PeerFailed, match=f"RuntimeError: {call} is impossible"):
        with PeerProcess(failing, wanted, facts, Path("none")) as process:
            process.decode(CHAT, 0, 1, max_seconds=60.0)


def test_a_converter_that_fails_is_quoted(tmp_path: Path) -> None:
    with pytest.raises(PeerFailed, match="ValueError: the checkpoint is odd"):
        prepare(peer(tmp_path / "log", fails="prepare"), setup(tmp_path), Path("none"))


def test_a_missing_environment_is_named_with_the_command_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(
        PeerFailed, match=r"no-python does not exist; make it with: python -m benchmarks.cpu.setup_peers"
    ):
        prepare(PEERS["openvino"], setup(tmp_path), tmp_path / "no-python")


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
