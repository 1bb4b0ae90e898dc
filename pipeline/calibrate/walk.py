"""One way through a graph, level by level, no further than somebody looks.

A level is run when a later one's inputs are asked for, with the weights that the IR has by then. What a build that was
cut off has done needs no activations at all; where it stopped, they are read from a copy or made again from the start.

The order in which linear layers can run: a level is what comes after one more of them.

    level 0    embedding, first norm          level 1    q, k, v, rope, attention       level 2    o, residual, norm ...

A node's level is the number of Gemms on the longest path to it, itself included. So the Gemms of a level read nothing
of their own level, and running the levels in order runs every node once.

What does not depend on the tokens' ids (positions, a norm weight plus one) has no level: it is shared, and whoever
reads it makes it again.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from ingot.passes.calibration import LinearGroup
from ingot.passes.weights import float32_values
from ingot.pipeline.calibrate.activations import MEMORY_BYTES, Activations, AnyArray
from ingot.pipeline.calibrate.data import CalibrationData
from ingot.pipeline.calibrate.graph_runner import GraphRunner
from ingot.pipeline.calibrate.journal import WalkJournal
from ingot.pipeline.calibrate.sequences import Chunk, chunks_of


@dataclass(frozen=True)
class Level:
    """Nodes of one level in graph order, and its linear layers by the value that they read."""

    nodes: tuple[ir.Node, ...]
    groups: tuple[LinearGroup, ...]


def shared_nodes(graph: ir.Graph) -> frozenset[ir.Node]:
    """Nodes that depend on constants, position_ids and logits_indices alone."""
    depending = {value for value in graph.inputs if value.name == "input_ids"}
    shared = []
    for node in graph:
        if any(value in depending for value in node.inputs if value is not None):
            depending.update(node.outputs)
        else:
            shared.append(node)
    return frozenset(shared)


def levels(graph: ir.Graph, shared: frozenset[ir.Node]) -> list[Level]:
    """All levels in order."""
    by_level: dict[int, list[ir.Node]] = {}
    level_of: dict[ir.Value, int] = {}
    for node in graph:
        if node in shared:
            continue
        level = max((level_of.get(value, 0) for value in node.inputs if value is not None), default=0)
        level += node.op_type == "Gemm"
        level_of.update(dict.fromkeys(node.outputs, level))
        by_level.setdefault(level, []).append(node)
    return [Level(tuple(by_level[level]), _groups(by_level[level])) for level in sorted(by_level)]


def _groups(nodes: Iterable[ir.Node]) -> tuple[LinearGroup, ...]:
    readers: dict[ir.Value, list[ir.Node]] = {}
    for node in nodes:
        if node.op_type == "Gemm" and node.inputs[0] is not None:
            readers.setdefault(node.inputs[0], []).append(node)
    return tuple(LinearGroup(source, tuple(linears)) for source, linears in readers.items())


@dataclass
class Walk:
    """The levels of a graph, and the activations that level `position` and those behind it read.

    is_recalled   every stage so far was recalled from the journal
    is_kept       every stage so far is in the journal, recalled or remembered
    """

    data: CalibrationData
    graph: ir.Graph
    store: Activations
    threads: int | None = None
    memory_bytes: int = MEMORY_BYTES
    journal: WalkJournal | None = None
    position: int = 0
    is_recalled: bool = True
    is_kept: bool = True
    shared: frozenset[ir.Node] = field(init=False)
    levels: list[Level] = field(init=False)
    chunks: Sequence[Chunk] = field(init=False)

    def __post_init__(self) -> None:
        self.shared = shared_nodes(self.graph)
        self.levels = levels(self.graph, self.shared)
        self.chunks = chunks_of(self.data)

    def reach(self, number: int) -> None:
        """Run what stands before a level and was not run yet."""
        assert self.position <= number, "a stage is valid until the next one is asked for"
        self._read_copy(number)
        while self.position < number:
            self._run(self.position)
            self.position += 1
            if self.journal is not None and self.is_kept:
                self.journal.snapshots.offer(self.position, self.store)

    def _read_copy(self, number: int) -> None:
        """Go on from the last copy of activations, where all before it was recalled."""
        if self.journal is None or not self.is_recalled:
            return
        level = self.journal.snapshots.newest(self.position, number)
        if level is None:
            return
        self.store.keep_only(set())
        if self.journal.snapshots.load(level, self.store):
            self.position = level
        else:
            self.position = 0

    def _run(self, number: int) -> None:
        """Run a level, keep what later ones read, drop what none does: chunk by chunk, little is there twice."""
        names = {value.name or "" for value in self.read_after(number)}
        made = self.read_later(number)
        for chunk, arrays in enumerate(self.outputs(self.levels[number].nodes, made) if made else ()):
            self.store.keep_only(names, chunk)
            for value, array in zip(made, arrays, strict=True):
                self.store.put(value.name or "", chunk, array)
        self.store.keep_only(names)

    def outputs(self, nodes: Sequence[ir.Node], values: Sequence[ir.Value]) -> Iterator[list[AnyArray]]:
        """The values, chunk by chunk."""
        runner = self.runner(nodes, values)
        weights = {value: float32_values(value) for value in runner.weights}
        for chunk in range(len(self.chunks)):
            yield runner.run(self.feeds(runner.activations, chunk), weights)

    def runner(self, nodes: Sequence[ir.Node], values: Sequence[ir.Value]) -> GraphRunner:
        """A session over these nodes."""
        tokens = self.data.sequences.shape[1] if self.data.lengths is None else None
        return GraphRunner(nodes, values, self.shared, tokens, self.threads)

    def feeds(self, names: Iterable[str], chunk: int) -> dict[str, AnyArray]:
        """Inputs and activations of a chunk, by name."""
        given = {name: self.chunks[chunk].feed(name) for name in names}
        return {name: self.store.get(name, chunk) if rows is None else rows for name, rows in given.items()}

    def read_later(self, number: int) -> list[ir.Value]:
        """What the level makes and a later one reads."""
        needed = self.read_after(number)
        return [value for node in self.levels[number].nodes for value in node.outputs if value in needed]

    def read_after(self, number: int) -> set[ir.Value]:
        """What levels behind this one read."""
        later = (node for level in self.levels[number + 1 :] for node in level.nodes)
        return {value for node in later for value in node.inputs if value is not None}

    def spread(self, tokens: int) -> list[int]:
        """As many chunks as hold about so many tokens, evenly spread."""
        chunks = len(self.chunks)
        count = min(chunks, -(-tokens * chunks // self.data.tokens))
        return [at * chunks // count for at in range(count)]
