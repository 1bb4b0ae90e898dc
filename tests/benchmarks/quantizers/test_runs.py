"""Runs of the packages are cached under everything that decides their result, and nothing else."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from benchmarks.adapters.quantizing import Outcome, job_from_json
from benchmarks.paths import ROOT
from benchmarks.peers import PeerFailed
from benchmarks.quantizers.runs import PEERS, Case, cache_key, job_of, last_words, run_peer

from tests.each_case import each_case

PEER = PEERS["llmc-gptq-asym"]


@pytest.fixture
def case(tmp_path: Path) -> Case:
    checkpoint = tmp_path / "tiny"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text("{}", "utf-8")
    (checkpoint / "model.safetensors").write_bytes(b"weights")
    np.save(tmp_path / "ids.npy", np.arange(6).reshape(2, 3))
    return Case(checkpoint, tmp_path / "ids.npy", bits=4, group_size=32)


def test_the_key_changes_with_method_settings_weights_and_tokens(case: Case) -> None:
    keys = {cache_key(PEER, case)}
    keys.add(cache_key(PEERS["llmc-gptq-sym"], case))
    keys.add(cache_key(PEERS["llmc-awq-asym"], case))
    keys.add(cache_key(PEER, replace(case, bits=3)))
    keys.add(cache_key(PEER, replace(case, group_size=64)))
    keys.add(cache_key(PEER, replace(case, keep=("down_proj",))))
    (case.checkpoint / "model.safetensors").write_bytes(b"others")
    keys.add(cache_key(PEER, case))
    np.save(case.sequences, np.zeros((2, 3), np.int64))
    keys.add(cache_key(PEER, case))
    assert len(keys) == 8


def test_the_key_does_not_know_where_things_lie_nor_the_threads(case: Case, tmp_path: Path) -> None:
    moved = case.checkpoint.rename(tmp_path / "elsewhere")
    (tmp_path / "ids.npy").rename(tmp_path / "moved.npy")
    there = replace(case, checkpoint=moved, sequences=tmp_path / "moved.npy", threads=2)
    (tmp_path / "tiny").symlink_to(moved)
    (tmp_path / "ids.npy").symlink_to(tmp_path / "moved.npy")
    assert cache_key(PEER, there) == cache_key(PEER, case)


def test_a_finished_run_is_taken_from_the_working_folder(case: Case, tmp_path: Path) -> None:
    name = f"tiny-4bit-g32-llm_compressor-gptq-asym-{cache_key(PEER, case)}"
    (tmp_path / "work" / name).mkdir(parents=True)
    outcome = Outcome(1.5, 1000, {"torch": "2"})
    (tmp_path / "work" / name / "outcome.json").write_text(json.dumps(asdict(outcome)), "utf-8")
    run = run_peer(PEER, case, tmp_path / "work", tmp_path / "no-venvs")
    assert (run.checkpoint, run.outcome) == (tmp_path / "work" / name / "checkpoint", outcome)


def test_a_missing_environment_is_named_with_the_command_that_makes_it(case: Case, tmp_path: Path) -> None:
    with pytest.raises(PeerFailed, match=r"llm_compressor.*setup_packages"):
        run_peer(PEER, case, tmp_path / "work", tmp_path / "no-venvs")


def test_the_adapter_reads_the_very_job_that_the_parent_made(case: Case, tmp_path: Path) -> None:
    job = job_of(PEER, replace(case, keep=("down_proj",)), tmp_path / "out")
    assert job_from_json(json.dumps(asdict(job), default=str)) == job
    assert job.token_ids().tolist() == [[0, 1, 2], [3, 4, 5]]


def test_an_exception_without_words_is_told_with_the_line_that_raised_it() -> None:
    assert last_words(["  assert width % 8 == 0", "         ^^^^^^^^^^", "AssertionError"]) == (
        "AssertionError: assert width % 8 == 0"
    )
    assert last_words(["  raise it", "ValueError: no such group", ""]) == "ValueError: no such group"
    assert last_words([]) == "it ended without a word"


@each_case("name", PEERS)
def test_every_row_has_its_adapter_and_its_environment(name: str) -> None:
    from benchmarks.quantizers.setup_packages import ENVIRONMENTS

    assert (ROOT / (PEERS[name].adapter.replace(".", "/") + ".py")).is_file()
    assert PEERS[name].package in ENVIRONMENTS
