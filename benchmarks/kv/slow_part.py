"""Tokens per second over context of one conversation that outgrows the fast part of the KV pool.

    python -m benchmarks.kv.slow_part --output benchmarks/results/kv-slow-part.json

Three engines generate the same tokens after a prompt of each length: one whose pool holds all of it, one with a slow
part in a file, as it is, and one whose slow part is throttled: the engine's clock goes on by the time in which `--link`
reads the bytes of the slow blocks of a step. (Waiting that long takes longer on a machine with other work.) Steps of
the three take turns in random order, so that other work slows all of them alike; times are their first deciles. The
bound is a step of the large pool plus the bytes of the slow part over the link, and the share of it that is reached is
to be at least 0.8. Answers that differ from those of the large pool are counted as wrong.
"""

import json
import math
import statistics
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.device import device_facts
from benchmarks.kv.capped_pool import SHAPE
from benchmarks.kv.synthetic_artifacts import WORK_FOLDER, synthetic_artifact
from ingot.artifact import Artifact
from ingot.runtime import Completion, Engine, SamplingParams
from ingot.runtime.executors import num_fast_blocks
from ingot.runtime.forward_batch import FloatArray, ForwardBatch

_CONTEXT = 40960
_POOLS = ("large", "file", "throttled")


class Throttle:
    """Takes the place of an executor's `forward` and of the engine's clock, which it sets forward for slow blocks."""

    def __init__(self, engine: Engine, bytes_per_second: float) -> None:
        self._executor = engine._executor
        self._forward = self._executor.forward
        self._bytes_per_second = bytes_per_second
        self._waited = 0.0
        self.slow_bytes = 0
        self._executor.forward = self.forward  # type: ignore[method-assign]
        engine.clock = engine._loop.clock = self

    def __call__(self) -> float:
        """The time."""
        return time.perf_counter() + self._waited

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)

    def forward(self, batch: ForwardBatch) -> FloatArray:
        """Run a step."""
        kv, num_fast = self._executor.kv_geometry, num_fast_blocks(self._executor)
        blocks = -(-batch.context_lens // kv.block_tokens)
        used = np.arange(batch.block_tables.shape[1]) < blocks[:, None]
        self.slow_bytes = int((used & (batch.block_tables >= num_fast)).sum()) * kv.block_bytes
        rows = self._forward(batch)
        self._waited += self.slow_bytes / self._bytes_per_second
        return rows


def measure(artifact: Artifact, context: int, fast_tokens: int, output_tokens: int, link: float) -> dict[str, Any]:
    """Figures of one context."""
    kv = artifact.manifest.kv
    blocks = (context + output_tokens) // kv.block_tokens + 2
    fast = min(blocks, fast_tokens // kv.block_tokens)
    sizes: list[dict[str, Any]] = [
        {"kv_blocks": blocks, "kv_offload": "off"},
        *[{"kv_blocks": fast, "kv_offload": "auto"}] * 2,
    ]
    engines = [Engine.load(artifact, num_threads=1, **options) for options in sizes]
    throttles = [Throttle(engine, speed) for engine, speed in zip(engines, (math.inf, math.inf, link), strict=True)]
    prompt = np.random.default_rng(context).integers(3, artifact.manifest.model.vocab_size, context).tolist()
    try:
        answers, seconds = _in_turns(
            engines, throttles, prompt, SamplingParams(max_tokens=output_tokens, ignore_eos=True)
        )
        moved = dict(engines[2].metrics().blocks_moved)
    finally:
        for engine in engines:
            engine.close()
    typical = [statistics.quantiles(each[1:], n=10)[0] for each in seconds]
    bound = typical[0] + throttles[2].slow_bytes / link
    return {
        "context_tokens": context,
        "fast_blocks": fast,
        "blocks": blocks,
        "slow_bytes": throttles[2].slow_bytes,
        **{f"{pool}_tokens_per_second": round(1 / each, 1) for pool, each in zip(_POOLS, typical, strict=True)},
        "bound_tokens_per_second": round(1 / bound, 1),
        "share_of_bound": round(bound / typical[2], 3),
        "blocks_moved": moved,
        "wrong": sum(each.token_ids != answers[0].token_ids for each in answers[1:]),
    }


def _in_turns(
    engines: list[Engine], clocks: list[Throttle], prompt: list[int], params: SamplingParams
) -> tuple[list[Completion], list[list[float]]]:
    """Each engine's answer, and the seconds of its steps after the prompt."""
    order = np.random.default_rng(0)
    answers, seconds = dict[int, Completion](), [list[float]() for _ in engines]
    for engine in engines:
        engine.add(prompt, params)
    while len(answers) < len(engines):
        left = [number for number in range(len(engines)) if number not in answers]
        for number in order.permutation(left):
            engine = engines[number]
            started = clocks[number]()
            outputs = engine.step()
            ended = clocks[number]()
            if any(output.tokens for output in outputs):
                seconds[number].append(ended - started)
            for output in outputs:
                if output.completion:
                    answers[number] = output.completion
    return [answers[number] for number in range(len(engines))], seconds


def table(rows: list[dict[str, Any]]) -> str:
    """Tokens per second as Markdown."""
    lines = [
        "| context | blocks of the fast part | large pool | slow part in a file | throttled | bound | share |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        rates = [f"{row[f'{pool}_tokens_per_second']:.0f}" for pool in (*_POOLS, "bound")]
        shown = (row["context_tokens"], f"{row['fast_blocks']} of {row['blocks']}", *rates, row["share_of_bound"])
        lines.append(f"| {' | '.join(map(str, shown))} |")
    return "\n".join(lines)


@click.command()
@click.option("--contexts", default="1024,2000,3072,4096,8192,16384,32768", show_default=True)
@click.option("--fast-tokens", default=2048, show_default=True, help="Tokens that the fast part holds.")
@click.option("--output-tokens", default=40, show_default=True)
@click.option("--link", default=1.0, show_default=True, help="GB/s of the throttled slow part.")
@click.option("--work-folder", type=click.Path(path_type=Path), default=WORK_FOLDER, help="Where the model is built.")
@click.option("--output", type=click.Path(path_type=Path), help="JSON file of results.")
def main(
    contexts: str, fast_tokens: int, output_tokens: int, link: float, work_folder: Path, output: Path | None
) -> None:
    """Measure all contexts, and print the table."""
    artifact = synthetic_artifact(SHAPE, "fp32-cpu", context_tokens=_CONTEXT, folder=work_folder)
    rows = []
    for context in map(int, contexts.split(",")):
        rows.append(measure(artifact, context, fast_tokens, output_tokens, link * 1e9))
        click.echo(json.dumps(rows[-1]))
        if output:
            facts = {"device": device_facts(), "shape": asdict(SHAPE), "link_gigabytes_per_second": link}
            output.write_text(json.dumps({**facts, "contexts": rows}, indent=1) + "\n")
    click.echo(table(rows))


if __name__ == "__main__":
    main()
