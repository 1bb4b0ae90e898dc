"""The calibration service: walks an IR level by level on whole sequences, in onnxruntime.

Observers are ordinary graph outputs: what a linear layer reads leaves its level as an output of that level's graph, and
is summed up from there. One level's weights are in memory at a time, in float32; activations are kept between levels
(activations.py). The result depends on the data, on onnxruntime and on numpy, not on chance.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from ingot.passes.calibration import (
    BlockRun,
    CalibrationFacts,
    CalibrationStage,
    Float32Array,
    Float64Array,
    LinearGroup,
)
from ingot.passes.weight_values import float32_values
from ingot.pipeline.calibrate.activations import Activations, AnyArray
from ingot.pipeline.calibrate.chunks import Chunk, chunks_of
from ingot.pipeline.calibrate.data import CalibrationData
from ingot.pipeline.calibrate.graph_runner import GraphRunner
from ingot.pipeline.calibrate.levels import Level, levels, shared_nodes

MEMORY_BYTES = 2 << 30


@dataclass(frozen=True)
class CalibrationEngine:
    """Implements passes.calibration.Calibration for one set of sequences.

    memory_bytes    activations that are kept in memory; the others go to a temporary folder on disk
    threads         of onnxruntime's process-wide pool; None takes it as it is, else INGOT_THREADS or all cores
    """

    data: CalibrationData
    memory_bytes: int = MEMORY_BYTES
    threads: int | None = None

    @property
    def facts(self) -> CalibrationFacts:
        """What the data is."""
        return self.data.facts

    def stages(self, model: ir.Model) -> Iterator[CalibrationStage]:
        """Every level that begins with linear layers; each is run when the next one is asked for."""
        with Activations(self.memory_bytes) as store:
            walk = _Walk(self, model.graph, store)
            for number, level in enumerate(walk.levels):
                if level.groups:
                    yield _Stage(walk, level)
                walk.run(number)

    def logits(self, model: ir.Model) -> Iterator[Float32Array]:
        """The model's logits [tokens, vocab] of all sequences in order, a few whole sequences at a time."""
        with Activations(self.memory_bytes) as store:
            walk = _Walk(self, model.graph, store)
            for number in range(len(walk.levels) - 1):
                walk.run(number)
            yield from (outputs[0] for outputs in walk.outputs(walk.levels[-1].nodes, list(model.graph.outputs)))


@dataclass
class _Walk:
    """One way through a graph: its levels, and the activations that are known so far."""

    engine: CalibrationEngine
    graph: ir.Graph
    store: Activations
    shared: frozenset[ir.Node] = field(init=False)
    levels: list[Level] = field(init=False)
    chunks: Sequence[Chunk] = field(init=False)

    def __post_init__(self) -> None:
        self.shared = shared_nodes(self.graph)
        self.levels = levels(self.graph, self.shared)
        self.chunks = chunks_of(self.engine.data)

    def run(self, number: int) -> None:
        """Run a level, keep what later ones read, drop what none does."""
        needed = self._read_after(number)
        made = [value for node in self.levels[number].nodes for value in node.outputs if value in needed]
        if made:
            for chunk, arrays in enumerate(self.outputs(self.levels[number].nodes, made)):
                for value, array in zip(made, arrays, strict=True):
                    self.store.put(value.name or "", chunk, array)
        self.store.keep_only({value.name or "" for value in needed})

    def outputs(self, nodes: Sequence[ir.Node], values: Sequence[ir.Value]) -> Iterator[list[AnyArray]]:
        """The values, chunk by chunk."""
        runner = self.runner(nodes, values)
        weights = {value: float32_values(value) for value in runner.weights}
        for chunk in range(len(self.chunks)):
            yield runner.run(self.feeds(runner, chunk), weights)

    def runner(self, nodes: Sequence[ir.Node], values: Sequence[ir.Value]) -> GraphRunner:
        """A session over these nodes."""
        data = self.engine.data
        tokens = data.sequences.shape[1] if data.lengths is None else None
        return GraphRunner(nodes, values, self.shared, tokens, self.engine.threads)

    def feeds(self, runner: GraphRunner, chunk: int) -> dict[str, AnyArray]:
        """What the session reads of a chunk."""
        given = {name: self.chunks[chunk].feed(name) for name in runner.activations}
        return {name: self.store.get(name, chunk) if rows is None else rows for name, rows in given.items()}

    def _read_after(self, number: int) -> set[ir.Value]:
        later = (node for level in self.levels[number + 1 :] for node in level.nodes)
        return {value for node in later for value in node.inputs if value is not None}


@dataclass(frozen=True)
class _Stage:
    """Implements passes.calibration.CalibrationStage."""

    walk: _Walk
    level: Level

    @property
    def groups(self) -> Sequence[LinearGroup]:
        """The level's linear layers."""
        return self.level.groups

    def gram(self, source: ir.Value) -> Float64Array:
        """X^T X: float32 products within a chunk, float64 sums over chunks."""
        total: Float64Array = np.zeros(())
        for x in self._inputs(source):
            total = total + (x.T @ x).astype(np.float64)
        return total

    def mean_absolute(self, source: ir.Value) -> Float64Array:
        """Mean |x| of each channel."""
        sums = [np.abs(x).sum(axis=0, dtype=np.float64) for x in self._inputs(source)]
        mean: Float64Array = np.sum(sums, axis=0) / self.walk.engine.data.tokens
        return mean

    def max_absolute(self, source: ir.Value) -> Float64Array:
        """Largest |x| of each channel."""
        largest: Float64Array = np.max([np.abs(x).max(axis=0) for x in self._inputs(source)], axis=0).astype(np.float64)
        return largest

    def rows(self, source: ir.Value, count: int) -> Float32Array:
        """Evenly spread rows."""
        total = self.walk.engine.data.tokens
        wanted, taken, start = np.unique(np.linspace(0, total - 1, min(count, total)).astype(np.int64)), [], 0
        for x in self._inputs(source):
            inside = wanted[(wanted >= start) & (wanted < start + len(x))]
            taken.append(x[inside - start])
            start += len(x)
        return np.concatenate(taken)

    def block(self, nodes: Sequence[ir.Node], outputs: Sequence[ir.Value], tokens: int) -> BlockRun:
        """A session over the nodes, and chunks that make up so many tokens, evenly spread."""
        walk = self.walk
        runner = walk.runner(nodes, outputs)
        own = {value: float32_values(value) for value in runner.weights}
        feeds = [walk.feeds(runner, chunk) for chunk in _spread(tokens, walk.engine.data.tokens, len(walk.chunks))]

        def run(weights: Mapping[ir.Node, Float32Array]) -> Sequence[Float32Array]:
            replaced = {node.inputs[1]: array for node, array in weights.items()}
            fed = {value: replaced.get(value, array) for value, array in own.items()}
            results = [runner.run(feed, fed) for feed in feeds]
            return [np.concatenate(parts) for parts in zip(*results, strict=True)]

        return run

    def _inputs(self, source: ir.Value) -> Iterator[Float32Array]:
        return (self.walk.store.get(source.name or "", chunk) for chunk in range(len(self.walk.chunks)))


def _spread(tokens: int, all_tokens: int, chunks: int) -> list[int]:
    """As many of the chunks as hold about so many tokens, evenly spread."""
    count = min(chunks, -(-tokens * chunks // all_tokens))
    return [at * chunks // count for at in range(count)]
