"""KL divergence of a model from a reference on calibration data, and its gradients with respect to stored values.

The graph is cut into blocks at the residual stream, where one value is live. A forward pass keeps only the values
between blocks; the backward pass runs each block again, so that one block's activations and weights are in memory at a
time.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.errors import PassError
from ingot.passes.calibration import WeightSource
from ingot.passes.numerics.arrays import Float32Array
from ingot.passes.weights import float32_values, is_stored
from ingot.pipeline.calibrate.gradients import Tape
from ingot.pipeline.calibrate.graph_runner import AnyArray, GraphCopy, GraphRunner, make_session
from ingot.pipeline.calibrate.kl import mean_kl_and_gradient
from ingot.pipeline.calibrate.sequences import Chunk
from ingot.pipeline.calibrate.steps import StepRunner
from ingot.runtime.cpu.segment_runner import use_thread_pool

Receiver = Callable[[ir.Value, Float32Array], None]

_SEED = "gradient."  # prefix of the input for the output's gradient


class ModelDivergence:
    """Implements passes.calibration.Divergence for a model and a reference.

    Both step runners have the same chunks; the reference's activations before its last step stay in its store.
    """

    def __init__(self, student: StepRunner, reference: StepRunner, wanted: Sequence[ir.Value]) -> None:
        self._reference = _Reference(reference)
        self._chunks = student.chunks
        self._blocks = [_BlockRunner(block, wanted, student) for block in blocks_of(student.graph, student.shared)]

    @property
    def batches(self) -> int:
        """Number of chunks of the data."""
        return len(self._chunks)

    def value(self, batch: int, weights: WeightSource) -> float:
        """Mean KL over the batch's positions, in nats."""
        logits = self._forward(self._chunks[batch], weights)[-1]
        return mean_kl_and_gradient(self._reference.logits(batch), logits)[0]

    def gradients(self, batch: int, weights: WeightSource, receive: Receiver) -> float:
        """Like `value`; calls `receive` with each wanted value's gradient, from the last block to the first."""
        chunk = self._chunks[batch]
        passed = self._forward(chunk, weights)
        loss, gradient = mean_kl_and_gradient(self._reference.logits(batch), passed[-1])
        first = next(at for at, block in enumerate(self._blocks) if block.wanted)
        for at in range(len(self._blocks) - 1, first - 1, -1):
            block = self._blocks[at]
            before, *found = block.backward(chunk, passed[at], weights, gradient)
            for value, array in zip(block.wanted, found, strict=True):
                receive(value, array)
            gradient = before
        return loss

    def _forward(self, chunk: Chunk, weights: WeightSource) -> list[Float32Array]:
        """The input of each block, and the logits at the end."""
        passed: list[Float32Array] = [np.zeros(0, np.float32)]  # the first block reads only token ids
        for block in self._blocks:
            passed.append(block.forward(chunk, passed[-1], weights))
        return passed


@dataclass(frozen=True)
class Block:
    """Nodes in graph order, the one value that they read of the block before (None for the first), and their result."""

    nodes: tuple[ir.Node, ...]
    source: ir.Value | None
    output: ir.Value

    @property
    def stored(self) -> list[ir.Value]:
        """Stored values that the nodes read, each once."""
        read = (value for node in self.nodes for value in node.inputs if value is not None)
        return list(dict.fromkeys(value for value in read if is_stored(value)))


def blocks_of(graph: ir.Graph, shared: frozenset[ir.Node]) -> Sequence[Block]:
    """Cut the graph, without its shared nodes, where one value is live and the block has a linear layer."""
    nodes = [node for node in graph if node not in shared and not any(map(is_stored, node.outputs))]
    last_reader = {value: at for at, node in enumerate(nodes) for value in node.inputs if value is not None}
    last_reader.update(dict.fromkeys(graph.outputs, len(nodes)))
    found: list[Block] = []
    live: set[ir.Value] = set()
    start, source = 0, None
    for at, node in enumerate(nodes):
        live.update(node.outputs)
        live = {value for value in live if last_reader.get(value, -1) > at}
        inside = nodes[start : at + 1]
        if len(live) == 1 and (source is None or any(node.op_type == "Gemm" for node in inside)):
            (output,) = live
            found.append(Block(tuple(inside), source, output))
            start, source = at + 1, output
    return found


@dataclass
class _BlockRunner:
    """A block's sessions: one for its output, one for its gradients (except for the first block, an embedding)."""

    block: Block
    all_wanted: Sequence[ir.Value]
    steps: StepRunner
    wanted: list[ir.Value] = field(init=False)
    _forward: GraphRunner = field(init=False)
    _backward: "GradientRunner | None" = field(init=False, default=None)

    def __post_init__(self) -> None:
        stored, steps, block = set(self.block.stored), self.steps, self.block
        self.wanted = [value for value in self.all_wanted if value in stored]
        self._forward = steps.graph_runner(block.nodes, [block.output], frozenset(self.wanted))
        if block.source is not None:
            wanted, tokens = [block.source, *self.wanted], steps.data.fixed_tokens
            self._backward = GradientRunner(block.nodes, block.output, wanted, steps.shared, tokens, steps.threads)

    def forward(self, chunk: Chunk, x: Float32Array, weights: WeightSource) -> Float32Array:
        runner = self._forward
        result: Float32Array = runner.run(_feeds(runner, chunk, x), _weights(runner, weights))[0]
        return result

    def backward(
        self, chunk: Chunk, x: Float32Array, weights: WeightSource, gradient: Float32Array
    ) -> list[Float32Array]:
        """Gradients with respect to the block's input and its wanted values."""
        runner = self._backward
        assert runner is not None, "the first block has an embedding, not a linear layer"
        return runner.run(_feeds(runner, chunk, x), _weights(runner, weights), gradient)


class GradientRunner:
    """A session over `nodes` (in graph order) that computes gradients of one `output`.

    wanted        values to differentiate by: stored values that the nodes read and at most one activation
    weights       stored values that are inputs, in float32, including the wanted ones
    activations   names of the other inputs
    """

    def __init__(
        self,
        nodes: Sequence[ir.Node],
        output: ir.Value,
        wanted: Sequence[ir.Value],
        shared: frozenset[ir.Node],
        sequence_tokens: int | None,
        num_threads: int | None = None,
    ) -> None:
        use_thread_pool(num_threads)
        copy = GraphCopy(shared, sequence_tokens, frozenset(wanted))
        for node in nodes:
            copy.node(node)
        # Differentiation changes rotary embeddings, so the graph is made first.
        graph = copy.model([output], nodes[0].graph).graph
        self._seed = f"{_SEED}{output.name}"
        _differentiate(copy, graph, copy.values[output], self._seed, [copy.values[value] for value in wanted])
        self.weights, self.activations = tuple(copy.weights), tuple(copy.activations)
        model = ir.Model(graph, ir_version=11, producer_name="ingot")
        self._session = make_session(model, f"the gradients of {nodes[-1].name!r}")

    def run(
        self, activations: Mapping[str, AnyArray], weights: Mapping[ir.Value, AnyArray], gradient: Float32Array
    ) -> list[Float32Array]:
        """Gradients with respect to the wanted values, in their order, from the gradient of the output."""
        feeds = {name: activations[name] for name in self.activations} | {self._seed: gradient}
        feeds |= {value.name or "": weights[value] for value in self.weights}
        results: list[Float32Array] = self._session.run(None, feeds)
        return results


def _differentiate(copy: GraphCopy, graph: ir.Graph, output: ir.Value, seed: str, wanted: Sequence[ir.Value]) -> None:
    """Replace the graph's outputs by the gradients with respect to the wanted values."""
    num_inputs, constants, num_nodes = len(graph.inputs), set(graph.initializers), len(copy.nodes)
    tape = Tape(copy, wanted)
    tape.accumulate(output, copy.input(ir.Value(name=seed), ir.DataType.FLOAT))
    gradients = tape.backward()
    missing = [value.name for value in wanted if value not in gradients]
    if missing:
        raise PassError(f"{output.name!r} does not depend on {missing[0]!r}")
    results = [copy.add("Identity", [gradients[value]]) for value in wanted]  # graph outputs must have distinct names
    graph.inputs.extend(copy.inputs[num_inputs:])
    for value in copy.initializers:
        if value.name not in constants:
            graph.register_initializer(value)
    graph.extend(copy.nodes[num_nodes:])
    for value in results:
        value.dtype = ir.DataType.FLOAT
    graph.outputs.clear()
    graph.outputs.extend(results)


class _Reference:
    """The reference model's logits, recomputed each time from the inputs of its last step."""

    def __init__(self, steps: StepRunner) -> None:
        last = len(steps.steps) - 1
        steps.advance_to(last)
        self._steps = steps
        self._runner = steps.graph_runner(steps.steps[last].nodes, list(steps.graph.outputs))
        self._weights = {value: float32_values(value) for value in self._runner.weights}

    def logits(self, chunk: int) -> Float32Array:
        """[tokens, vocab]."""
        feeds = self._steps.feeds(self._runner.activations, chunk)
        logits: Float32Array = self._runner.run(feeds, self._weights)[0]
        return logits


def _feeds(runner: GraphRunner | GradientRunner, chunk: Chunk, x: Float32Array) -> dict[str, NDArray[Any]]:
    """Inputs of the chunk by name; the block's input `x` is the only other activation."""
    given = {name: chunk.feed(name) for name in runner.activations}
    return {name: x if array is None else array for name, array in given.items()}


def _weights(runner: GraphRunner | GradientRunner, weights: WeightSource) -> Mapping[ir.Value, Float32Array]:
    found = {value: weights(value) for value in runner.weights}
    return {value: float32_values(value) if array is None else array for value, array in found.items()}
