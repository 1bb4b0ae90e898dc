"""Runs a graph on calibration data step by step, each step at most one linear layer deep.

    step 0    embedding, first norm          step 1    q, k, v, rope, attention       step 2    o, residual, norm ...

A node's step is the number of Gemms on the longest path to it, itself included. So no Gemm of a step reads the result
of another, and running the steps in order runs every node once. Nodes that do not depend on the token ids (positions, a
norm weight plus one) belong to no step: they are shared, and computed again wherever they are read.

A step runs when the inputs of a later one are needed, with the weights of the IR at that time. Steps that a journal has
results for need no activations; where the interrupted build stopped, they are loaded from a snapshot or recomputed.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from ingot.passes.calibration import LinearGroup
from ingot.passes.weights import float32_values
from ingot.pipeline.calibrate.activations import MEMORY_BYTES, Activations, AnyArray
from ingot.pipeline.calibrate.data import CalibrationData
from ingot.pipeline.calibrate.graph_runner import GraphRunner
from ingot.pipeline.calibrate.journal import RunJournal
from ingot.pipeline.calibrate.sequences import Chunk, chunks_of


@dataclass(frozen=True)
class Step:
    """Nodes of one step in graph order, and its linear layers by the value that they read."""

    nodes: tuple[ir.Node, ...]
    groups: tuple[LinearGroup, ...]


@dataclass
class StepRunner:
    """The steps of a graph, and the activations that step `position` and later ones read.

    is_resumed     every stage so far was loaded from the journal
    is_recorded    every stage so far is in the journal, loaded or saved
    """

    data: CalibrationData
    graph: ir.Graph
    store: Activations
    threads: int | None = None
    memory_bytes: int = MEMORY_BYTES
    journal: RunJournal | None = None
    position: int = 0
    is_resumed: bool = True
    is_recorded: bool = True
    shared: frozenset[ir.Node] = field(init=False)
    steps: list[Step] = field(init=False)
    chunks: Sequence[Chunk] = field(init=False)

    def __post_init__(self) -> None:
        self.shared = shared_nodes(self.graph)
        self.steps = steps_of(self.graph, self.shared)
        self.chunks = chunks_of(self.data)

    def advance_to(self, number: int) -> None:
        """Run the steps before this one that have not run yet."""
        assert self.position <= number, "a stage is valid until the next one is requested"
        self._load_snapshot(number)
        while self.position < number:
            self._run(self.position)
            self.position += 1
            if self.journal is not None and self.is_recorded:
                self.journal.snapshots.offer(self.position, self.store)

    def outputs(self, nodes: Sequence[ir.Node], values: Sequence[ir.Value]) -> Iterator[list[AnyArray]]:
        """Run the nodes and return the values, chunk by chunk."""
        runner = self.graph_runner(nodes, values)
        weights = {value: float32_values(value) for value in runner.weights}
        for chunk in range(len(self.chunks)):
            yield runner.run(self.feeds(runner.activations, chunk), weights)

    def graph_runner(
        self, nodes: Sequence[ir.Node], values: Sequence[ir.Value], fed: frozenset[ir.Value] = frozenset()
    ) -> GraphRunner:
        """A session over these nodes."""
        return GraphRunner(nodes, values, self.shared, self.data.fixed_tokens, self.threads, fed)

    def feeds(self, names: Iterable[str], chunk: int) -> dict[str, AnyArray]:
        """Inputs and activations of a chunk, by name."""
        given = {name: self.chunks[chunk].feed(name) for name in names}
        return {name: self.store.get(name, chunk) if rows is None else rows for name, rows in given.items()}

    def kept_outputs(self, number: int) -> list[ir.Value]:
        """Values that the step computes and a later one reads."""
        needed = self.read_after(number)
        return [value for node in self.steps[number].nodes for value in node.outputs if value in needed]

    def read_after(self, number: int) -> set[ir.Value]:
        """Values that steps after this one read."""
        later = (node for step in self.steps[number + 1 :] for node in step.nodes)
        return {value for node in later for value in node.inputs if value is not None}

    def spread_chunks(self, tokens: int) -> list[int]:
        """Evenly spread chunks that hold about this many tokens."""
        chunks = len(self.chunks)
        count = min(chunks, -(-tokens * chunks // self.data.tokens))
        return [at * chunks // count for at in range(count)]

    def _load_snapshot(self, number: int) -> None:
        """Continue from the last snapshot of activations, if all stages before it were loaded from the journal."""
        if self.journal is None or not self.is_resumed:
            return
        step = self.journal.snapshots.newest(self.position, number)
        if step is None:
            return
        self.store.keep_only(set())
        self.position = step if self.journal.snapshots.load(step, self.store) else 0

    def _run(self, number: int) -> None:
        """Run a step chunk by chunk, replacing each chunk's inputs that no later step reads by the step's outputs."""
        names = {value.name or "" for value in self.read_after(number)}
        made = self.kept_outputs(number)
        for chunk, arrays in enumerate(self.outputs(self.steps[number].nodes, made) if made else ()):
            self.store.keep_only(names, chunk)
            for value, array in zip(made, arrays, strict=True):
                self.store.put(value.name or "", chunk, array)
        self.store.keep_only(names)


def shared_nodes(graph: ir.Graph) -> frozenset[ir.Node]:
    """Nodes that depend only on constants, position_ids and logits_indices."""
    depending = {value for value in graph.inputs if value.name == "input_ids"}
    shared = []
    for node in graph:
        if any(value in depending for value in node.inputs if value is not None):
            depending.update(node.outputs)
        else:
            shared.append(node)
    return frozenset(shared)


def steps_of(graph: ir.Graph, shared: frozenset[ir.Node]) -> list[Step]:
    """All steps in order."""
    by_step: dict[int, list[ir.Node]] = {}
    step_of: dict[ir.Value, int] = {}
    for node in graph:
        if node in shared:
            continue
        step = max((step_of.get(value, 0) for value in node.inputs if value is not None), default=0)
        step += node.op_type == "Gemm"
        step_of.update(dict.fromkeys(node.outputs, step))
        by_step.setdefault(step, []).append(node)
    return [Step(tuple(by_step[step]), _groups(by_step[step])) for step in sorted(by_step)]


def _groups(nodes: Iterable[ir.Node]) -> tuple[LinearGroup, ...]:
    readers: dict[ir.Value, list[ir.Node]] = {}
    for node in nodes:
        if node.op_type == "Gemm" and node.inputs[0] is not None:
            readers.setdefault(node.inputs[0], []).append(node)
    return tuple(LinearGroup(source, tuple(linears)) for source, linears in readers.items())
