"""Processor time of a step around the model: scheduler, batch, sampling, outputs. Its executor computes nothing.

    python -m benchmarks.cpu.step_overhead

Each figure is the least of the rounds, in microseconds of processor time: other processes only add time. Logits are
normal random numbers, the worst case of top-p: nearly all tokens are needed to reach its share.
"""

import json
import time
from pathlib import Path

import click
import numpy as np
from tests.simulators.fake_executor import FakeExecutor

from benchmarks.device import device_facts
from benchmarks.paths import ROOT
from ingot.runtime import Engine, SamplingParams
from ingot.runtime.forward_batch import FloatArray, ForwardBatch

PARAMS = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top-k 40": {"temperature": 0.8, "top_k": 40},
    "top-p 0.95": {"temperature": 0.8, "top_p": 0.95},
}
ROUNDS = 7
_STEPS = 40  # of a round
_PROMPT_TOKENS = 32


class ConstantExecutor(FakeExecutor):
    """Gives every step the same logits [R, vocab]."""

    def __init__(self, vocab_size: int, max_sequences: int) -> None:
        super().__init__(num_blocks=8000, max_batch_tokens=512, vocab_size=vocab_size, context_tokens=2048)
        rng = np.random.default_rng(0)
        self._constant = rng.standard_normal((max_sequences, vocab_size)).astype(np.float32)

    def forward(self, batch: ForwardBatch) -> FloatArray:
        """The first rows of the constant logits."""
        return self._constant[: len(batch.logits_indices)]


def microseconds(num_sequences: int, vocab_size: int, **given: float) -> float:
    """Processor time of one decode step of so many sequences."""
    params = SamplingParams(max_tokens=1500, ignore_eos=True, seed=1, **given)  # type: ignore[arg-type]
    rounds = []
    with Engine(ConstantExecutor(vocab_size, num_sequences)) as engine:
        for number in range(num_sequences):
            engine.add([1 + number] * _PROMPT_TOKENS, params)
        for _ in range(10):
            engine.step()
        for _ in range(ROUNDS):
            started = time.process_time_ns()
            for _ in range(_STEPS):
                engine.step()
            rounds.append((time.process_time_ns() - started) / _STEPS)
    return min(rounds) / 1000


@click.command(help=__doc__)
@click.option("--vocab-size", default=49_152, show_default=True, help="Tokens of the vocabulary.")
@click.option("--batch", "batches", multiple=True, default=(1, 8, 64), show_default=True, help="Sequences of a step.")
@click.option("--output", type=click.Path(path_type=Path), default=ROOT / "benchmarks/results/step-overhead.json")
def main(vocab_size: int, batches: tuple[int, ...], output: Path) -> None:
    """Measure, print and write."""
    found: dict[str, dict[str, float]] = {}
    for name, given in PARAMS.items():
        found[name] = {str(batch): round(microseconds(batch, vocab_size, **given), 1) for batch in batches}
        click.echo(f"{name:12}" + "".join(f"{figure:>12,.1f} us" for figure in found[name].values()))
    facts = {"device": device_facts(), "vocab_size": vocab_size, "microseconds_of_a_step": found}
    output.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
