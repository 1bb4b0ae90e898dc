"""The restore benchmark reads its cases, finds the crossover, and puts a prefix where it says it is."""

from contextlib import closing
from pathlib import Path

import click
import numpy as np
import pytest
from benchmarks.kv.prefix_places import Case, Conversation, Place, drop_from_page_cache
from benchmarks.kv.restore import Times, _crossover

from tests.conftest import BuildArtifact


def test_a_case_has_three_numbers() -> None:
    assert Case.parse("2000,80,3") == Case(2000, 80, 3)
    for text in ("2000,80", "a,b,c", "0,80,1"):
        with pytest.raises(click.BadParameter, match=r"2000,80,3|at least 1"):
            Case.parse(text)


def test_times_are_divided_by_the_computed_one_of_their_prompt() -> None:
    times = Times()
    times.add("host", 0.5, 5.0)
    times.add("host", 1.0, 20.0)
    times.add("host", 0.2, 1.0)
    assert times.rows()["host"] == {"ms": 500.0, "of_computed": 0.1, "faster": 10.0, "all_ms": [500.0, 1000.0, 200.0]}


def test_the_crossover_is_where_restoring_wins_for_good() -> None:
    lengths = [16, 32, 64, 128]
    assert _crossover(lengths, [True, False, True, True]) == 64
    assert _crossover(lengths, [True] * 4) == 16
    assert _crossover(lengths, [True, True, True, False]) is None


def test_a_prefix_is_answered_from_each_place(
    build_unmeasured: BuildArtifact, two_layers: Path, tmp_path: Path
) -> None:
    artifact = build_unmeasured("fp32-cpu", two_layers)
    prompt = np.random.default_rng(0).integers(3, artifact.manifest.model.vocab_size, 70).tolist()
    places: tuple[Place, ...] = ("computed", "device", "host", "disk")
    with closing(Conversation(artifact, tmp_path / "kv", Case(48, 22, 1), None, prompt)) as conversation:
        for place in (*places, *places):  # `first_token` asserts that the prefix was there, and the logits equal
            conversation.move(place)
            assert conversation.first_token(place) > 0
        conversation.move("disk")
        conversation.restart()
        conversation.move("disk")
        assert 0 <= drop_from_page_cache(tmp_path / "kv") <= 1
        assert conversation.first_token("disk") > 0
        conversation.engine.check()
