"""ik_llama.cpp, by its own bench programs, which run once for each measurement and load the model each time.

Options: file_type, as llama.cpp's adapter has it, and the same file; llama_bench, the path of the program. llama-bench
computes prompts and decodes one sequence; batches are decoded by llama-batched-bench, where it is next to llama-bench.
Weights are repacked at run time, so they are not mapped: they are in allocated memory, which glibc advises to be in
huge pages (GLIBC_TUNABLES, benchmarks/peers.py). Keys and values are in 16 bits.
"""

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from benchmarks.adapters.base import PreparedModel, Setup, Timing, Tokens, run

_MICRO_BATCH_TOKENS = 512
_RUN_SECONDS = 280.0  # less than the parent waits for an answer
_MOST_OUTPUT = 1 << 20
_OPTIONS = ("-rtr", "1", "-fa", "1", "-mmp", "0", "-ngl", "0")
# Flash attention fails here for several sequences, with an assertion: iqk_fa_templates.h, S > 0.
_BATCHED_OPTIONS = ("-rtr", "-fa", "off", "-ngl", "0")


def prepare(setup: Setup) -> PreparedModel:
    """The GGUF file of llama.cpp's adapter, and the version that the bench program reports."""
    from benchmarks.adapters import llama_cpp

    model = llama_cpp.prepare(setup)
    found = _Programs(setup).measure(model.model, prompt=16, generated=0)
    version = f"{found.get('build_commit', 'unknown')} ({found.get('build_number', 'unknown')})"
    types = model.notes.partition(";")[0]
    notes = f"{types}; KV cache f16; llama-bench {' '.join(_OPTIONS)}; loads and repacks the model for each figure"
    return replace(model, versions={"ik_llama.cpp": version}, notes=notes)


class IkLlamaBench:
    """A model's file; every measurement is a process of its own."""

    def __init__(self, setup: Setup, model: Path) -> None:
        self._programs, self._model = _Programs(setup), model

    def prefill(self, prompts: Tokens) -> Timing:
        """The prompt of one sequence; llama-bench makes its own tokens."""
        batch, tokens = prompts.shape
        if batch > 1:
            return self._programs.measure_batch(self._model, batch, tokens, generated=1)[0]
        return _timing(self._programs.measure(self._model, prompt=tokens, generated=0), steps=1)

    def decode(self, prompts: Tokens, steps: int) -> Timing:
        """Tokens after a prompt, which is not part of the time."""
        batch, tokens = prompts.shape
        if batch > 1:
            return self._programs.measure_batch(self._model, batch, tokens, steps)[1]
        return _timing(self._programs.measure(self._model, prompt=tokens, generated=steps), steps)


class _Programs:
    """llama-bench, and llama-batched-bench next to it."""

    def __init__(self, setup: Setup) -> None:
        self._bench, self._threads = Path(str(setup.options["llama_bench"])), str(setup.threads)

    def measure(self, model: Path, prompt: int, generated: int) -> dict[str, Any]:
        """llama-bench's record of a prompt, or of tokens generated after it."""
        work = (
            ["-n", "0", "-p", str(prompt)] if not generated else ["-n", "0", "-p", "0", "-gp", f"{prompt},{generated}"]
        )
        output, _ = self._run(self._bench, model, [*work, "-r", "1", "-o", "json", *_OPTIONS])
        return record_of(output, prompt, generated)

    def measure_batch(self, model: Path, batch: int, prompt: int, generated: int) -> tuple[Timing, Timing]:
        """Times of the prompts of a batch, and of the tokens after them."""
        program = self._bench.with_name("llama-batched-bench")
        if not program.is_file():
            raise RuntimeError(
                f"llama-bench runs one sequence; a batch of {batch} needs {program}, which does not exist"
            )
        tokens = batch * (prompt + generated)
        sizes = ["-npp", str(prompt), "-ntg", str(generated), "-npl", str(batch), "-c", str(tokens), "-b", str(tokens)]
        output = "\n".join(self._run(program, model, [*sizes, "-ub", str(_MICRO_BATCH_TOKENS), *_BATCHED_OPTIONS]))
        return batched_timings(output, batch, prompt, generated)

    def _run(self, program: Path, model: Path, options: Sequence[str]) -> tuple[str, str]:
        if not os.access(program, os.X_OK) or not program.is_file():
            raise RuntimeError(
                f"{program} is not a program; give llama-bench of ik_llama.cpp with --ik-llama-bench PATH"
            )
        command = [str(program.absolute()), "-m", str(model), "-t", self._threads, *options]
        # the programs leave log files where they run
        with (
            tempfile.TemporaryDirectory() as folder,
            tempfile.TemporaryFile() as output,
            tempfile.TemporaryFile() as log,
        ):
            done = subprocess.run(command, stdout=output, stderr=log, cwd=folder, timeout=_RUN_SECONDS, check=False)
            text, errors = _beginning(output), _beginning(log)
        if done.returncode != 0:
            words = [line.strip() for line in (text + errors).splitlines() if line.strip()]
            raise RuntimeError(
                f"{program.name} ended with status {done.returncode}: {words[-1] if words else 'no message'}"
            )
        return text, errors


def _beginning(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(_MOST_OUTPUT).decode("utf-8", "replace")


def record_of(output: str, prompt: int, generated: int) -> dict[str, Any]:
    """The record of the one test in llama-bench's JSON; RuntimeError where it is not that of the request."""
    try:
        records = json.loads(output[max(0, output.find("[")) :])
    except (ValueError, RecursionError) as error:
        raise RuntimeError(f"llama-bench printed {output[:80]!r}; a list in JSON is expected") from error
    wanted = {"n_prompt": prompt, "n_gen": generated}
    for record in records if isinstance(records, list) else []:
        if isinstance(record, dict) and all(record.get(name) == value for name, value in wanted.items()):
            return record
    raise RuntimeError(f"llama-bench's output has no test of {wanted}: {output[:200]!r}")


def _timing(record: dict[str, Any], steps: int) -> Timing:
    """The mean time of a test; the program does not report processor time."""
    nanoseconds = record.get("avg_ns")
    if not isinstance(nanoseconds, int) or nanoseconds <= 0:
        raise RuntimeError(f"llama-bench's avg_ns is {nanoseconds!r}; a time above 0 is expected")
    return Timing(nanoseconds / 1e9, None, steps)


def batched_timings(output: str, batch: int, prompt: int, generated: int) -> tuple[Timing, Timing]:
    """Times of prompts and tokens from the row of llama-batched-bench's table.

    Its columns are PP, TG, B, N_KV, T_PP s, S_PP t/s, T_TG s, S_TG t/s, T s, S t/s. Speeds have more digits than times.
    """
    numbers = "".join(rf"\|\s*{number}\s*" for number in (prompt, generated, batch)) + r"\|[^|]*" * 2
    found = re.search(numbers + r"\|\s*(\d+\.\d+)\s*\|[^|]*\|\s*(\d+\.\d+)\s*\|", output)
    speeds = [float(speed) for speed in found.groups()] if found else [0.0]
    if min(speeds) <= 0:
        raise RuntimeError(f"llama-batched-bench's table has no row of {batch} sequences: {output[-200:]!r}")
    prompts, tokens = speeds
    return Timing(batch * prompt / prompts, None, 1), Timing(batch * generated / tokens, None, generated)


if __name__ == "__main__":
    run(prepare, IkLlamaBench)
