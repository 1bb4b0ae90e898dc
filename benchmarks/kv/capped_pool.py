"""Tokens per second of conversations whose contexts together exceed the KV pool, from 1k to 32k tokens each.

    python -m benchmarks.kv.capped_pool --output benchmarks/results/kv-capped-pool.json

In a turn all `--conversations` of C tokens ask at once: each sends a few new tokens and gets `--output-tokens`.
The pool holds all of them, a half, or a quarter ("exceeded by" 1, 2, 4): they take turns in it, and in the last turn
those that were admitted together outgrow it, so that some are preempted. Each size is measured with host memory below
the pool (blocks are swapped out and restored) and without (they are computed again). Tokens per second are generated
tokens over the seconds of all turns after the first, in which the contexts are computed.

A cell ends after the turn that exceeds `--cell-seconds`; its rate is of the turns that it made. All cells of a context
must give the same tokens; those that differ count as wrong, and requests that fail as lost. The cells with swapping
come first. Results are written after each cell; cells that `--output` has already are not measured again.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.device import device_facts
from benchmarks.kv.synthetic_artifacts import WORK_FOLDER, synthetic_artifact
from benchmarks.shapes import ModelShape
from ingot.artifact import Artifact
from ingot.runtime import Engine, SamplingParams

SHAPE = ModelShape(
    name="long-context",
    hidden_size=64,
    num_layers=2,
    num_heads=1,
    num_kv_heads=1,
    intermediate_size=128,
    vocab_size=512,
    tied_head=True,
)
_MOST_CONTEXT = 40960
_ASKED_TOKENS = 16  # new ones in a turn
_ROOM = 1.02  # of the pool, for the watermark of admission

Answer = tuple[int, ...]


@dataclass(frozen=True)
class Cell:
    """One measurement."""

    context_tokens: int
    exceeded_by: int
    swaps: bool

    @property
    def name(self) -> str:
        """Key in the results."""
        kind = "swap" if self.swaps else "recompute"
        return f"{self.context_tokens} tokens, pool exceeded by {self.exceeded_by}, {kind}"


@dataclass(frozen=True)
class Load:
    """Conversations that every cell serves."""

    most_conversations: int
    most_tokens: int
    output_tokens: int
    turns: int

    def conversations(self, context_tokens: int) -> int:
        """Number of conversations: fewer where their contexts together would take too long to compute."""
        return max(1, min(self.most_conversations, self.most_tokens // context_tokens))

    def context_after(self, context_tokens: int) -> int:
        """Tokens of a conversation after the first turn and all others."""
        return context_tokens + (1 + self.turns) * (_ASKED_TOKENS + self.output_tokens)


class Conversations:
    """The histories of a cell, which grow by a turn each time."""

    def __init__(self, count: int, context_tokens: int, vocab_size: int) -> None:
        self._rng, self._vocab_size = np.random.default_rng(context_tokens), vocab_size
        self._histories = [self._tokens(context_tokens) for _ in range(count)]
        self.answers: list[Answer] = []

    def ask(self, engine: Engine, output_tokens: int) -> int:
        """Answer all conversations; returns how many answers failed."""
        ids = {}
        for number, history in enumerate(self._histories):
            history += self._tokens(_ASKED_TOKENS)
            ids[engine.add(list(history), SamplingParams(max_tokens=output_tokens, ignore_eos=True))] = number
        lost = 0
        answers: dict[int, Answer] = {}
        while engine.has_unfinished():
            for output in engine.step():
                if output.completion:
                    lost += output.completion.error is not None
                    answers[ids[output.request_id]] = output.completion.token_ids
        for number, history in enumerate(self._histories):
            history += answers[number]
            self.answers.append(answers[number])
        return lost

    def _tokens(self, count: int) -> list[int]:
        tokens: list[int] = self._rng.integers(3, self._vocab_size, count).tolist()
        return tokens


def pool_blocks(cell: Cell, load: Load, block_tokens: int) -> int:
    """Blocks that hold all conversations after all turns; or a share of them, less what makes them outgrow it."""
    conversations = load.conversations(cell.context_tokens)
    held = conversations // cell.exceeded_by
    per_conversation = -(-load.context_after(cell.context_tokens) // block_tokens) + 1
    if cell.exceeded_by == 1:
        return int(held * per_conversation * _ROOM) + conversations
    outgrown = held * load.output_tokens // (2 * block_tokens)
    return max(held * per_conversation - outgrown, per_conversation)


def measure(artifact: Artifact, cell: Cell, load: Load, most_seconds: float) -> tuple[dict[str, Any], list[Answer]]:
    """Figures of a cell, and its answers in order."""
    geometry = artifact.manifest.kv
    num_blocks, conversations = pool_blocks(cell, load, geometry.block_tokens), load.conversations(cell.context_tokens)
    options: dict[str, Any] = {"kv_blocks": num_blocks, "max_sequences": conversations}
    if cell.swaps:
        options["kv_host_bytes"] = 2 * cell.exceeded_by * num_blocks * geometry.block_bytes
    histories = Conversations(conversations, cell.context_tokens, artifact.manifest.model.vocab_size)
    lost, seconds = 0, list[float]()
    with Engine.load(artifact, **options) as engine:
        for _ in range(1 + load.turns):
            started = time.perf_counter()
            lost += histories.ask(engine, load.output_tokens)
            seconds.append(time.perf_counter() - started)
            if len(seconds) > 1 and sum(seconds[1:]) > most_seconds:
                break
        metrics = engine.metrics()
        engine.check()
    generated = (len(seconds) - 1) * conversations * load.output_tokens
    figures = {
        **asdict(cell),
        "conversations": conversations,
        "blocks": num_blocks,
        "tokens_per_second": round(generated / sum(seconds[1:]), 1),
        "turn_seconds": [round(each, 3) for each in seconds],
        "preemptions": metrics.num_preemptions,
        "hit_tokens": metrics.prefix_hit_tokens_by_tier,
        "asked_tokens": metrics.prefix_query_tokens,
        "lost": lost,
    }
    return figures, histories.answers


def cells(contexts: Sequence[int], exceeded: Sequence[int]) -> list[Cell]:
    """Those with swapping first, which are fast."""
    return [Cell(context, times, swaps) for swaps in (True, False) for context in contexts for times in exceeded]


def table(results: Sequence[dict[str, Any]]) -> str:
    """Tokens per second as Markdown, and their share of those of the pool that holds everything."""
    rates = {(row["context_tokens"], row["swaps"], row["exceeded_by"]): row["tokens_per_second"] for row in results}
    columns = sorted({(not swaps, times) for _, swaps, times in rates})
    heads = [f"{'recompute' if slow else 'swap'}, {times}" for slow, times in columns]
    lines = [f"| context | {' | '.join(heads)} |", "|---" * (len(columns) + 1) + "|"]
    for context in sorted({context for context, _, _ in rates}):
        base = rates.get((context, True, 1))
        row = [_shown(rates.get((context, not slow, times)), base) for slow, times in columns]
        lines.append(f"| {context} | {' | '.join(row)} |")
    return "\n".join(lines)


def _shown(rate: float | None, base: float | None) -> str:
    if rate is None:
        return "-"
    return f"{rate:.0f} ({rate / base:.0%})" if base else f"{rate:.0f}"


def _numbers(_context: click.Context, _option: click.Parameter, text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(map(int, text.split(",")))
    except ValueError:
        numbers = (0,)
    if min(numbers) < 1:
        raise click.BadParameter(f"{text!r}; give whole numbers from 1 with commas between them")
    return numbers


@click.command()
@click.option("--contexts", default="1024,2048,4096,8192,16384,32768", show_default=True, callback=_numbers)
@click.option("--exceeded", default="1,2,4", show_default=True, callback=_numbers, help="Contexts over the pool.")
@click.option("--conversations", default=8, show_default=True)
@click.option("--most-tokens", default=1 << 17, show_default=True, help="Of all contexts; fewer converse beyond it.")
@click.option("--output-tokens", default=64, show_default=True)
@click.option("--turns", default=3, show_default=True, help="Measured turns, after the first.")
@click.option("--cell-seconds", default=20.0, show_default=True)
@click.option("--work-folder", type=click.Path(path_type=Path), default=WORK_FOLDER, help="Where the model is built.")
@click.option("--output", type=click.Path(path_type=Path), help="JSON file of results, made or continued.")
def main(
    contexts: tuple[int, ...],
    exceeded: tuple[int, ...],
    conversations: int,
    most_tokens: int,
    output_tokens: int,
    turns: int,
    cell_seconds: float,
    work_folder: Path,
    output: Path | None,
) -> None:
    """Measure all cells, and print the table."""
    artifact = synthetic_artifact(SHAPE, "fp32-cpu", context_tokens=_MOST_CONTEXT, folder=work_folder)
    load = Load(conversations, most_tokens, output_tokens, turns)
    facts = {"device": device_facts(), "shape": asdict(SHAPE), "load": asdict(load)}
    document: dict[str, Any] = {**facts, "cells": {}}
    if output and output.is_file():
        document = json.loads(output.read_text("utf-8"))
        if {name: document.get(name) for name in facts} != facts:
            raise click.UsageError(f"{output} has results of another machine, shape or load; move it away")
    right: dict[int, list[Answer]] = {}
    for cell in cells(contexts, exceeded):
        if cell.name in document["cells"]:
            continue
        figures, answers = measure(artifact, cell, load, cell_seconds)
        known = right.setdefault(cell.context_tokens, answers)
        figures["wrong"] = sum(one != other for one, other in zip(known, answers, strict=False))
        if len(answers) > len(known):
            right[cell.context_tokens] = answers
        document["cells"][cell.name] = figures
        click.echo(f"{cell.name}: {json.dumps(figures)}")
        if output:
            output.write_text(json.dumps(document, indent=1) + "\n")
    click.echo(table([*document["cells"].values()]))


if __name__ == "__main__":
    main()
