"""ik_llama.cpp's bench programs are called for each measurement, and their output is read or refused."""

import sys
from pathlib import Path

import numpy as np
import pytest
from benchmarks.adapters.base import Setup
from benchmarks.adapters.ik_llama_bench import IkLlamaBench, batched_timings, record_of

from tests.each_case import each_case
from tests.simulators import llama_bench

MODEL = Path("/models/small-q4_0.gguf")


def adapter(folder: Path, programs: tuple[str, ...], threads: int = 2) -> IkLlamaBench:
    for name in programs:
        program = folder / name
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{llama_bench.__file__}" {name} "$@"\n')
        program.chmod(0o755)
    options = {"llama_bench": str(folder / "llama-bench")}
    return IkLlamaBench(Setup("small", 64, folder, threads, 8, 32, 256, options=options), MODEL)


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLAMA_BENCH_LOG", str(tmp_path / "log"))
    return tmp_path / "log"


def test_a_prompt_and_tokens_after_it_are_one_run_each_repacked_and_not_mapped(tmp_path: Path, log: Path) -> None:
    engine = adapter(tmp_path, ("llama-bench",))
    prompt = engine.prefill(np.ones((1, 512), np.int64))
    tokens = engine.decode(np.ones((1, 64), np.int64), 16)
    assert (prompt.seconds, prompt.cpu_seconds, prompt.steps) == (0.5, None, 1)
    assert (tokens.seconds, tokens.cpu_seconds, tokens.steps) == (1.28, None, 16)
    first, second = log.read_text().splitlines()
    common = "-r 1 -o json -rtr 1 -fa 1 -mmp 0 -ngl 0"
    assert first == f"llama-bench -m {MODEL} -t 2 -n 0 -p 512 {common}"
    assert second == f"llama-bench -m {MODEL} -t 2 -n 0 -p 0 -gp 64,16 {common}"


def test_a_batch_is_run_by_the_program_next_to_it(tmp_path: Path, log: Path) -> None:
    engine = adapter(tmp_path, ("llama-bench", "llama-batched-bench"))
    assert engine.prefill(np.ones((8, 16), np.int64)).seconds == pytest.approx(1.28)
    tokens = engine.decode(np.ones((8, 16), np.int64), 4)
    assert tokens.seconds == pytest.approx(0.8)
    assert tokens.steps == 4
    assert "-npp 16 -ntg 4 -npl 8 -c 160 -b 160 -ub 512 -rtr -fa off" in log.read_text()


def test_without_that_program_a_batch_is_refused_by_name(tmp_path: Path, log: Path) -> None:
    engine = adapter(tmp_path, ("llama-bench",))
    with pytest.raises(RuntimeError, match=r"a batch of 8 needs .*llama-batched-bench, which does not exist"):
        engine.decode(np.ones((8, 16), np.int64), 4)


def test_a_missing_program_is_named_with_the_option(tmp_path: Path, log: Path) -> None:
    with pytest.raises(RuntimeError, match=r"llama-bench is not a program; .* with --ik-llama-bench PATH"):
        adapter(tmp_path, ()).prefill(np.ones((1, 16), np.int64))


def test_a_program_that_fails_is_quoted(tmp_path: Path, log: Path) -> None:
    engine = adapter(tmp_path, ("llama-bench",), threads=9)
    with pytest.raises(RuntimeError, match="llama-bench ended with status 1: main: error: unable to load model"):
        engine.prefill(np.ones((1, 16), np.int64))


def test_a_program_that_prints_something_else_is_quoted(tmp_path: Path, log: Path) -> None:
    engine = adapter(tmp_path, ("llama-bench",), threads=8)
    with pytest.raises(RuntimeError, match=r"printed 'no JSON\\n'; a list in JSON is expected"):
        engine.prefill(np.ones((1, 16), np.int64))


@each_case("output", ["[]", '[{"n_prompt": 4, "n_gen": 0}]', '{"n_prompt": 16}', "[3]", "[" * 100_000])
def test_output_without_the_test_is_refused(output: str) -> None:
    with pytest.raises(RuntimeError, match="llama-bench"):
        record_of(output, prompt=16, generated=0)


@each_case("time", ["0", "-5", '"fast"', "null", "NaN"])
def test_a_time_that_is_not_above_zero_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, time: str) -> None:
    program = tmp_path / "llama-bench"
    program.write_text(f'#!/bin/sh\necho \'[{{"n_prompt": 16, "n_gen": 0, "avg_ns": {time}}}]\'\n')
    program.chmod(0o755)
    engine = adapter(tmp_path, ())
    with pytest.raises(RuntimeError, match="a time above 0 is expected"):
        engine.prefill(np.ones((1, 16), np.int64))


@each_case("row", ["", "|    16 |      4 |    7 |    140 | 1.0 | 100.00 | 1.0 | 40.00 | 2.0 | 70.00 |"])
def test_a_table_without_the_batch_is_refused(row: str) -> None:
    with pytest.raises(RuntimeError, match="no row of 8 sequences"):
        batched_timings(row, batch=8, prompt=16, generated=4)


def test_a_table_with_a_speed_of_zero_is_refused() -> None:
    row = llama_bench.ROW.format(16, 4, 8, 160, 0.0, 0.0, 1.0, 40.0, 1.0, 1.0)
    with pytest.raises(RuntimeError, match="no row of 8 sequences"):
        batched_timings(row, batch=8, prompt=16, generated=4)
