"""Cost of a stage of a CPU program: steps of one token of an artifact that is cut into more and more stages.

    python -m benchmarks.cpu.stages ARTIFACT [--threads N]

Every second stage is on the other of two devices, so each stage copies what it reads.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
from tests.runtime.cpu.native.staged_artifacts import with_stages
from tests.runtime.cuda.batches import Growing, token_ids

from ingot.artifact import Artifact, open_artifact
from ingot.artifact.programs.cpu_program_checks import read_operations
from ingot.runtime.cpu.native_executor import NativeExecutor

RUNS = (16, 8, 4, 3, 2, 1)  # operations of a stage
ROUNDS, STEPS, CONTEXT = 15, 100, 200


def main() -> None:
    """Print the least and the median time of a step by the number of stages, and the cost of one more stage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    artifact = open_artifact(given.artifact)
    count = len(read_operations(artifact).operations)
    with tempfile.TemporaryDirectory() as folder:
        cut = {1: artifact}
        for run in RUNS:
            devices = [at // run % 2 for at in range(count)]
            cut[-(-count // run)] = with_stages(artifact, Path(folder, str(run)), devices)
        blocks = -(-(CONTEXT + STEPS) // artifact.manifest.kv.block_tokens)
        executors = {
            stages: NativeExecutor(one, num_blocks=blocks, num_threads=given.threads) for stages, one in cut.items()
        }
        seconds: dict[int, list[float]] = {stages: [] for stages in executors}
        for _ in range(ROUNDS):
            for stages, executor in executors.items():
                seconds[stages] += step_seconds(artifact, executor, blocks)
    for stages, found in sorted(seconds.items()):
        print(f"{stages:4} stages: {min(found) * 1e6:8.1f} us, median {np.median(found) * 1e6:8.1f}")
    slope = np.polyfit(list(seconds), [float(np.median(found)) for found in seconds.values()], 1)[0]
    print(f"one more stage: {slope * 1e6:.1f} us")


def step_seconds(artifact: Artifact, executor: NativeExecutor, blocks: int) -> list[float]:
    """Seconds of steps of one token."""
    growing = Growing([token_ids(CONTEXT + STEPS, 0, artifact.manifest.model.vocab_size)], [list(range(blocks))])
    growing.done[0] = CONTEXT
    found = []
    for _ in range(STEPS):
        batch = growing.step([1])
        started = time.perf_counter()
        executor.forward(batch)
        found.append(time.perf_counter() - started)
    return found


if __name__ == "__main__":
    main()
