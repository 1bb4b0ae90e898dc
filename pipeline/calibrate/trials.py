"""Measures how much the model's logits change when some weights are replaced: KL divergence of many trials at once.

All trials of a call run together, step by step, so that each step's session is built and its weights are read once.
Activations before the first step come from the step runner and are not recomputed.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from ingot.passes.calibration import Trial
from ingot.passes.numerics.arrays import Float32Array
from ingot.passes.weights import float32_values
from ingot.pipeline.calibrate.activations import Activations, AnyArray
from ingot.pipeline.calibrate.graph_runner import GraphRunner
from ingot.pipeline.calibrate.kl import kl_of_rows
from ingot.pipeline.calibrate.steps import StepRunner


@dataclass
class Trials:
    """The trial runs over one step runner, by their number of tokens; equal numbers share chunks and reference."""

    step_runner: StepRunner
    _runs: dict[int, "TrialRuns"] = field(default_factory=dict)

    def on(self, tokens: int) -> "TrialRuns":
        """Trials on about this many tokens."""
        if tokens not in self._runs:
            self._runs[tokens] = TrialRuns(self.step_runner, tuple(self.step_runner.spread_chunks(tokens)))
        return self._runs[tokens]

    def close(self) -> None:
        """Free the reference logits."""
        for runs in self._runs.values():
            runs.close()


@dataclass
class TrialRuns:
    """Trials on some chunks of the data. The reference logits are those of the IR at the first call."""

    step_runner: StepRunner
    chunks: tuple[int, ...]
    _reference: Activations = field(init=False)
    _runners: dict[int, tuple[tuple[ir.Value | None, ...], GraphRunner]] = field(default_factory=dict)
    _is_measured: bool = False

    def __post_init__(self) -> None:
        self._reference = Activations(self.step_runner.memory_bytes)

    def close(self) -> None:
        """Free the reference logits."""
        self._reference.close()

    def divergences(self, step: int, trials: Sequence[Trial]) -> list[float]:
        """Mean over tokens of KL(reference logits || logits of the trial), for each trial."""
        if not self._is_measured:
            for _, chunk, logits in self._logits(step, [{}]):
                self._reference.put("", chunk, logits)
            self._is_measured = True
        sums, tokens = np.zeros(len(trials)), sum(self.step_runner.chunks[chunk].tokens for chunk in self.chunks)
        for first, group in self._by_first_step(step, trials):
            for trial, chunk, logits in self._logits(first, [trials[at] for at in group]):
                sums[group[trial]] += kl_of_rows(self._reference.get("", chunk), logits).sum()
        return [float(total) / tokens for total in sums]

    def _by_first_step(self, step: int, trials: Sequence[Trial]) -> Iterator[tuple[int, list[int]]]:
        """Group trials: those that replace an operand of step 0 (the embedding) start there, the others at `step`."""
        first_operands = {value for node in self.step_runner.steps[0].nodes for value in node.inputs}
        from_start = [at for at, trial in enumerate(trials) if first_operands & trial.keys()]
        others = [at for at in range(len(trials)) if at not in set(from_start)]
        yield from ((first, group) for first, group in ((0, from_start), (step, others)) if group)

    def _logits(self, first: int, trials: Sequence[Trial]) -> Iterator[tuple[int, int, Float32Array]]:
        """Trial, chunk and logits [tokens, vocab] of every trial and chunk."""
        with Activations(self.step_runner.memory_bytes) as store:
            for step in range(first, len(self.step_runner.steps) - 1):
                made = self.step_runner.kept_outputs(step)
                for trial, chunk, arrays in self._run(step, made, trials, store):
                    for value, array in zip(made, arrays, strict=True):
                        store.put(_key(trial, value.name or ""), chunk, array)
                needed = {value.name or "" for value in self.step_runner.read_after(step)}
                store.keep_only({_key(trial, name) for trial in range(len(trials)) for name in needed})
            outputs = list(self.step_runner.graph.outputs)
            for trial, chunk, arrays in self._run(len(self.step_runner.steps) - 1, outputs, trials, store):
                yield trial, chunk, arrays[0]

    def _run(
        self, step: int, made: Sequence[ir.Value], trials: Sequence[Trial], store: Activations
    ) -> Iterator[tuple[int, int, list[AnyArray]]]:
        """Run one step on all trials and chunks."""
        if not made:
            return
        runner = self._runner(step, made)
        own = {value: float32_values(value) for value in runner.weights}
        for at, trial in enumerate(trials):
            weights = {value: trial[value]() if value in trial else array for value, array in own.items()}
            for chunk in self.chunks:
                yield at, chunk, runner.run(self._feeds(runner, at, chunk, store), weights)

    def _feeds(self, runner: GraphRunner, trial: int, chunk: int, store: Activations) -> Mapping[str, AnyArray]:
        """The trial's own activations, or else the step runner's."""
        own = {name for name in runner.activations if store.holds(_key(trial, name))}
        feeds = {name: store.get(_key(trial, name), chunk) for name in own}
        return feeds | self.step_runner.feeds([name for name in runner.activations if name not in own], chunk)

    def _runner(self, step: int, made: Sequence[ir.Value]) -> GraphRunner:
        """The step's session, rebuilt only after a pass has changed the operands of the step."""
        nodes = self.step_runner.steps[step].nodes
        reads = tuple(value for node in nodes for value in node.inputs)
        if step not in self._runners or self._runners[step][0] != reads:
            self._runners[step] = reads, self.step_runner.graph_runner(nodes, made)
        return self._runners[step][1]


def _key(trial: int, name: str) -> str:
    return f"{trial}/{name}"
