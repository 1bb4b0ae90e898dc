"""What the model's logits lose when some weights are other ones: runs from a level to the end, many trials at once.

All trials of a call go through the graph together, level by level, so that a level's session is made and its weights
are read once for all of them. What lies before the first level is taken from the walk, and computed by nobody twice.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from ingot.passes.calibration import Float32Array, Trial
from ingot.passes.weights import float32_values
from ingot.pipeline.calibrate.activations import Activations, AnyArray
from ingot.pipeline.calibrate.graph_runner import GraphRunner
from ingot.pipeline.calibrate.walk import Walk

_ROWS_AT_ONCE = 64
_LARGE = 40.0


@dataclass
class TrialRuns:
    """Trials on some of a walk's chunks.

    The logits that they are measured against are those of the IR as it is at the first call.
    """

    walk: Walk
    chunks: tuple[int, ...]
    _reference: Activations = field(init=False)
    _runners: dict[int, tuple[tuple[ir.Value | None, ...], GraphRunner]] = field(default_factory=dict)
    _is_measured: bool = False

    def __post_init__(self) -> None:
        self._reference = Activations(self.walk.memory_bytes)

    def close(self) -> None:
        """Drop what is kept."""
        self._reference.close()

    def divergences(self, level: int, trials: Sequence[Trial]) -> list[float]:
        """Mean over tokens of KL(logits as they are || logits of the trial), of each trial."""
        if not self._is_measured:
            for _, chunk, logits in self._logits(level, [{}]):
                self._reference.put("", chunk, logits)
            self._is_measured = True
        sums, tokens = np.zeros(len(trials)), sum(self.walk.chunks[chunk].tokens for chunk in self.chunks)
        for first, group in self._by_first_level(level, trials):
            for trial, chunk, logits in self._logits(first, [trials[at] for at in group]):
                sums[group[trial]] += divergence(self._reference.get("", chunk), logits).sum()
        return [float(total) / tokens for total in sums]

    def _by_first_level(self, level: int, trials: Sequence[Trial]) -> Iterator[tuple[int, list[int]]]:
        """Trials that change what the model begins with (the embedding) run from there, the others from `level`."""
        beginning = {value for node in self.walk.levels[0].nodes for value in node.inputs}
        from_start = [at for at, trial in enumerate(trials) if beginning & trial.keys()]
        others = [at for at in range(len(trials)) if at not in set(from_start)]
        yield from ((first, group) for first, group in ((0, from_start), (level, others)) if group)

    def _logits(self, first: int, trials: Sequence[Trial]) -> Iterator[tuple[int, int, Float32Array]]:
        """Trial, chunk and logits [tokens, vocab] of every trial and chunk."""
        with Activations(self.walk.memory_bytes) as store:
            for level in range(first, len(self.walk.levels) - 1):
                made = self.walk.read_later(level)
                for trial, chunk, arrays in self._run(level, made, trials, store):
                    for value, array in zip(made, arrays, strict=True):
                        store.put(_key(trial, value.name or ""), chunk, array)
                needed = {value.name or "" for value in self.walk.read_after(level)}
                store.keep_only({_key(trial, name) for trial in range(len(trials)) for name in needed})
            outputs = list(self.walk.graph.outputs)
            for trial, chunk, arrays in self._run(len(self.walk.levels) - 1, outputs, trials, store):
                yield trial, chunk, arrays[0]

    def _run(
        self, level: int, made: Sequence[ir.Value], trials: Sequence[Trial], store: Activations
    ) -> Iterator[tuple[int, int, list[AnyArray]]]:
        """One level on all trials and chunks."""
        if not made:
            return
        runner = self._runner(level, made)
        own = {value: float32_values(value) for value in runner.weights}
        for at, trial in enumerate(trials):
            weights = {value: trial[value]() if value in trial else array for value, array in own.items()}
            for chunk in self.chunks:
                yield at, chunk, runner.run(self._feeds(runner, at, chunk, store), weights)

    def _feeds(self, runner: GraphRunner, trial: int, chunk: int, store: Activations) -> Mapping[str, AnyArray]:
        """The trial's own activations, else the walk's."""
        own = {name for name in runner.activations if store.holds(_key(trial, name))}
        feeds = {name: store.get(_key(trial, name), chunk) for name in own}
        return feeds | self.walk.feeds([name for name in runner.activations if name not in own], chunk)

    def _runner(self, level: int, made: Sequence[ir.Value]) -> GraphRunner:
        """The level's session, made anew only when a pass has changed what the level reads."""
        nodes = self.walk.levels[level].nodes
        reads = tuple(value for node in nodes for value in node.inputs)
        if level not in self._runners or self._runners[level][0] != reads:
            self._runners[level] = reads, self.walk.runner(nodes, made)
        return self._runners[level][1]


def divergence(reference: Float32Array, logits: Float32Array) -> Float32Array:
    """KL(p || q) of each row [rows], in nats, from logits of p and of q, both [rows, vocab].

    With d = logits - reference, less its mean under p: KL = log(1 + E_p[exp(d) - 1 - d]). Every term is positive, so
    that nothing cancels where q is next to p; and equal logits are at zero.
    """
    blocks = (slice(at, at + _ROWS_AT_ONCE) for at in range(0, len(logits), _ROWS_AT_ONCE))
    return np.concatenate([_divergence(reference[block], logits[block]) for block in blocks])


def _divergence(reference: Float32Array, logits: Float32Array) -> Float32Array:
    log_p = _log_softmax(reference)
    p, change = np.exp(log_p), logits - reference
    change -= np.einsum("rv,rv->r", p, change)[:, None]
    if change.max() > _LARGE:  # exp could overflow; and a loss that is not small has nothing to cancel
        direct: Float32Array = np.maximum(np.einsum("rv,rv->r", p, log_p - _log_softmax(logits)), np.float32(0))
        return direct
    result: Float32Array = np.log1p(np.einsum("rv,rv->r", p, np.expm1(change) - change))
    return result


def _log_softmax(logits: Float32Array) -> Float32Array:
    shifted: Float32Array = logits - logits.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted


def _key(trial: int, name: str) -> str:
    return f"{trial}/{name}"
