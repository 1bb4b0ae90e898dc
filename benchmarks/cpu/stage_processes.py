"""Throughput of several processes against one, in turns: the same requests, at once, with the same tokens.

    python -m benchmarks.cpu.stage_processes ARTIFACT [--processes 2] [--batch 16] [--tokens 64] [--output FILE]

`stages` has that many stages, `ranks` as many ranks of one stage (tensor parallel), with a thread each. `one` is a
process with one thread, `threads` one with as many threads as the others have together.
Ratios are of tokens per second to those of `one` in the same round. On a machine with other work they are too small:
`processor` is what processor time allows on an idle machine at most, where the busiest stage has a core of its own and
all processes together have the machine's.
"""

import argparse
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.device import device_facts
from ingot.artifact import Artifact, open_artifact
from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.cpu.native_executor import NativeExecutor, available_cores
from ingot.runtime.cpu.stages.process_stages import ProcessStages
from ingot.runtime.engine.engine import Engine

_PROMPT_TOKENS = 16


def measure(artifact: Artifact, *, processes: int, batch: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Return the rounds and their medians. RuntimeError where the tokens differ."""
    vocabulary, block = artifact.manifest.model.vocab_size, artifact.manifest.kv.block_tokens
    prompts = [[(7 * at + 13 * number) % vocabulary for at in range(_PROMPT_TOKENS)] for number in range(batch)]
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    blocks = batch * (-(-(_PROMPT_TOKENS + tokens) // block) + 1)
    # Threads, stages and ranks.
    options = {
        "one": (1, 1, 1),
        "threads": (processes, 1, 1),
        "stages": (processes, processes, 1),
        "ranks": (processes, 1, processes),
    }
    engines = {
        name: Engine.load(
            artifact,
            num_threads=threads,
            stages=stages,
            tensor_parallel=ranks,
            kv_blocks=blocks,
            prefix_cache=False,
        )
        for name, (threads, stages, ranks) in options.items()
    }
    found = [_round(engines, prompts, params) for _ in range(rounds + 1)][1:]  # the first warms up
    for engine in engines.values():
        engine.close()
    ratios = [
        {
            **{name: each[name]["rate"] / each["one"]["rate"] for name in ("threads", "stages", "ranks")},
            "processor": each["one"]["engine"] / _least_seconds(**each["stages"]),
        }
        for each in found
    ]
    return {
        "artifact": artifact.manifest.identity,
        "processes": processes,
        "batch": batch,
        "tokens": tokens,
        "load": os.getloadavg()[0],
        "ratios": {name: median(each[name] for each in ratios) for name in ratios[0]},
        "best_rates": {name: max(each[name]["rate"] for each in found) for name in options},
        "rounds": found,
    }


def _round(engines: Mapping[str, Engine], prompts: list[list[int]], params: SamplingParams) -> dict[str, Any]:
    """Tokens per second of each engine, and the processor seconds of this process and of the others."""
    found, answers = {}, []
    for name, engine in engines.items():
        pids = _stages(engine)
        before, started, own = [_cpu_seconds(pid) for pid in pids], time.perf_counter(), time.process_time()
        completions = engine.generate(prompts, params)
        seconds = time.perf_counter() - started
        answers.append([each.token_ids for each in completions])
        found[name] = {
            "rate": sum(map(len, answers[-1])) / seconds,
            "engine": time.process_time() - own,
            "stages": [_cpu_seconds(pid) - since for pid, since in zip(pids, before, strict=True)],
        }
    if any(each != answers[0] for each in answers):
        raise RuntimeError("several processes gave other tokens than one: report it with the artifact")
    return found


def _least_seconds(rate: float, engine: float, stages: Sequence[float]) -> float:
    """The time that processor seconds of the engine's process and of its stages take on an idle machine at least."""
    return max(*stages, (engine + sum(stages)) / available_cores())


def _stages(engine: Engine) -> list[int]:
    assert isinstance(engine._executor, NativeExecutor)
    program = engine._executor._program
    return [each.process.pid for each in program._processes] if isinstance(program, ProcessStages) else []


def _cpu_seconds(pid: int) -> float:
    """Processor time of a process's threads, in nanoseconds in its schedstat."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def main() -> None:
    """Measure, print the ratios, and write all rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    found = measure(
        open_artifact(given.artifact),
        processes=given.processes,
        batch=given.batch,
        tokens=given.tokens,
        rounds=given.rounds,
    )
    for name, ratio in found["ratios"].items():
        print(f"{name:10} {ratio:.2f}")
    print("tokens/s, best:", {name: round(rate) for name, rate in found["best_rates"].items()}, "load", found["load"])
    if given.output:
        given.output.write_text(json.dumps({"device": device_facts(), **found}, indent=1))


if __name__ == "__main__":
    main()
