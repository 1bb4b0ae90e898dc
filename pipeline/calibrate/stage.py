"""What a calibrated pass sees of one level: sums over its inputs, runs of its block, and what was done in it before."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from ingot.passes.calibration import (
    Arrays,
    BlockRun,
    Float32Array,
    Float64Array,
    LinearGroup,
    Trial,
)
from ingot.passes.weights import float32_values
from ingot.pipeline.calibrate.data_checks import Reach, ReachLog
from ingot.pipeline.calibrate.trials import TrialRuns
from ingot.pipeline.calibrate.walk import Level, Walk
from ingot.progress import note

_REACH = "ingot.reach."  # beside what a pass remembers: how much data its layers were fed


@dataclass
class Trials:
    """The trials of a walk, by the tokens that they run on; the same ones each time."""

    walk: Walk
    _runs: dict[int, TrialRuns] = field(default_factory=dict)

    def on(self, tokens: int) -> TrialRuns:
        """Trials on about so many tokens."""
        if tokens not in self._runs:
            self._runs[tokens] = TrialRuns(self.walk, tuple(self.walk.spread(tokens)))
        return self._runs[tokens]

    def close(self) -> None:
        """Drop what is kept."""
        for runs in self._runs.values():
            runs.close()


@dataclass
class Stage:
    """Implements passes.calibration.CalibrationStage for the level `level_number`.

    place    the how manyeth level with layers it is, and of how many
    """

    walk: Walk
    level_number: int
    place: tuple[int, int]
    log: ReachLog
    trials: Trials
    is_recalled: bool = False
    is_kept: bool = False
    _reach: dict[str, Reach] = field(default_factory=dict)

    @property
    def level(self) -> Level:
        """The level itself."""
        return self.walk.levels[self.level_number]

    @property
    def groups(self) -> Sequence[LinearGroup]:
        """The level's linear layers."""
        return self.level.groups

    def recorded(self) -> Arrays | None:
        """What the journal has of this stage."""
        journal = self.walk.journal
        found = None if journal is None else journal.recall(self.place[0])
        if found is None:
            self._tell_resumed()
            return None
        self.is_recalled = self.is_kept = True
        for name in [name for name in found if name.startswith(_REACH)]:
            self.log.add(Reach(name.removeprefix(_REACH), *map(int, found[name])))
        return {name: array for name, array in found.items() if not name.startswith(_REACH)}

    def record(self, arrays: Arrays) -> None:
        """Into the journal, with what reached the layers."""
        if self.walk.journal is not None:
            reach = {f"{_REACH}{r.layer}": np.array([r.tokens, r.channels, r.silent]) for r in self._reach.values()}
            self.walk.journal.remember(self.place[0], {**arrays, **reach})
            self.is_kept = True

    def gram(self, source: ir.Value) -> Float64Array:
        """X^T X: float32 products within a chunk, float64 sums over chunks."""
        total: Float64Array = np.zeros(())
        for x in self._inputs(source):
            total = total + (x.T @ x).astype(np.float64)
        self._seen(source, np.diagonal(total))
        return total

    def mean_absolute(self, source: ir.Value) -> Float64Array:
        """Mean |x| of each channel."""
        sums = [np.abs(x).sum(axis=0, dtype=np.float64) for x in self._inputs(source)]
        mean: Float64Array = np.sum(sums, axis=0) / self._rows(source)
        self._seen(source, mean)
        return mean

    def max_absolute(self, source: ir.Value) -> Float64Array:
        """Largest |x| of each channel."""
        largest: Float64Array = np.max([np.abs(x).max(axis=0) for x in self._inputs(source)], axis=0).astype(np.float64)
        self._seen(source, largest)
        return largest

    def rows(self, source: ir.Value, count: int) -> Float32Array:
        """Evenly spread rows."""
        total = self._rows(source)
        wanted, taken, start = np.unique(np.linspace(0, total - 1, min(count, total)).astype(np.int64)), [], 0
        for x in self._inputs(source):
            inside = wanted[(wanted >= start) & (wanted < start + len(x))]
            taken.append(x[inside - start])
            start += len(x)
        return np.concatenate(taken)

    def block(self, nodes: Sequence[ir.Node], outputs: Sequence[ir.Value], tokens: int) -> BlockRun:
        """A session over the nodes, and chunks that make up so many tokens, evenly spread."""
        walk = self.walk
        walk.reach(self.level_number)
        runner = walk.runner(nodes, outputs)
        own = {value: float32_values(value) for value in runner.weights}
        feeds = [walk.feeds(runner.activations, chunk) for chunk in walk.spread(tokens)]

        def run(weights: Mapping[ir.Node, Float32Array]) -> Sequence[Float32Array]:
            replaced = {node.inputs[1]: array for node, array in weights.items()}
            fed = {value: replaced.get(value, array) for value, array in own.items()}
            results = [runner.run(feed, fed) for feed in feeds]
            return [np.concatenate(parts) for parts in zip(*results, strict=True)]

        return run

    def divergences(self, trials: Sequence[Trial], tokens: int) -> Sequence[float]:
        """Runs from here to the end."""
        self.walk.reach(self.level_number)
        return self.trials.on(tokens).divergences(self.level_number, trials)

    def _tell_resumed(self) -> None:
        """Tell the user where the work goes on."""
        if self.walk.journal is not None and self.walk.is_recalled and self.place[0] > 1:
            note(f"{self.walk.journal.name}: resumed at stage {self.place[0]} of {self.place[1]}")

    def _inputs(self, source: ir.Value) -> Iterator[Float32Array]:
        """Rows of a group's input, chunk by chunk."""
        self.walk.reach(self.level_number)
        return (self.walk.store.get(source.name or "", chunk) for chunk in range(len(self.walk.chunks)))

    def _rows(self, source: ir.Value) -> int:
        return sum(len(x) for x in self._inputs(source))

    def _seen(self, source: ir.Value, sizes: Float64Array) -> None:
        """Note how much data reaches the layers that read the source."""
        readers = [group.linears[0].name for group in self.groups if group.source is source]
        layer = (readers or [source.name])[0] or ""
        self._reach[layer] = Reach.of(layer, self._rows(source), sizes)
        self.log.add(self._reach[layer])
