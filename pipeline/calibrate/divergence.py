"""KL divergence of a model from a reference on calibration data, and its gradients by any stored values.

The model runs piece by piece (divergence.py); only what passes between pieces is kept of the way there, and each
piece runs once more on the way back, so that one piece's activations and weights are in memory at a time.

Runs some nodes of an IR and, behind them, their gradients: given dL/d(output), dL/d(weights) and dL/d(inputs).

Where an IR can be cut in two with one value in between: at the residual stream.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime  # type: ignore[import-untyped]
from numpy.typing import NDArray

from ingot.errors import PassError
from ingot.passes.calibration import Float32Array, WeightSource
from ingot.passes.weights import float32_values, is_stored
from ingot.pipeline.calibrate.gradients import Tape
from ingot.pipeline.calibrate.graph_runner import AnyArray, GraphCopy, GraphRunner
from ingot.pipeline.calibrate.sequences import Chunk
from ingot.pipeline.calibrate.walk import Walk
from ingot.runtime.cpu.segment_runner import session_options, use_thread_pool


@dataclass(frozen=True)
class Piece:
    """Nodes in graph order, the one value that they read of the piece before (None for the first), and their result."""

    nodes: tuple[ir.Node, ...]
    source: ir.Value | None
    output: ir.Value

    @property
    def stored(self) -> list[ir.Value]:
        """Stored values that the nodes read, each once."""
        read = (value for node in self.nodes for value in node.inputs if value is not None)
        return list(dict.fromkeys(value for value in read if is_stored(value)))


def pieces(graph: ir.Graph, shared: frozenset[ir.Node]) -> Sequence[Piece]:
    """The graph but its shared nodes, cut wherever one value is left and a linear layer stands before."""
    nodes = [node for node in graph if node not in shared and not _makes_stored(node)]
    last_reader = {value: at for at, node in enumerate(nodes) for value in node.inputs if value is not None}
    last_reader.update(dict.fromkeys(graph.outputs, len(nodes)))
    found: list[Piece] = []
    live: set[ir.Value] = set()
    start, source = 0, None
    for at, node in enumerate(nodes):
        live.update(node.outputs)
        live = {value for value in live if last_reader.get(value, -1) > at}
        inside = nodes[start : at + 1]
        if len(live) == 1 and (source is None or any(node.op_type == "Gemm" for node in inside)):
            (output,) = live
            found.append(Piece(tuple(inside), source, output))
            start, source = at + 1, output
    return found


def _makes_stored(node: ir.Node) -> bool:
    return any(is_stored(value) for value in node.outputs)


_SEED = "gradient."


class GradientRunner:
    """A session over `nodes` (in graph order) for the gradient of one `output`.

    wanted        values that the nodes read: stored ones and at most one activation
    weights       stored values that are fed in float32, the wanted ones among them
    activations   names of the values that are fed
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
        graph = copy.model([output], nodes[0].graph).graph  # before the gradients: it turns the rows of rotations
        self._seed, self._given = f"{_SEED}{output.name}", output
        _differentiate(copy, graph, copy.values[output], self._seed, [copy.values[value] for value in wanted])
        self.weights, self.activations, self.wanted = tuple(copy.weights), tuple(copy.activations), tuple(wanted)
        try:
            proto = ir.to_proto(ir.Model(graph, ir_version=11, producer_name="ingot")).SerializeToString()
            self._session = onnxruntime.InferenceSession(proto, session_options(), providers=["CPUExecutionProvider"])
        except Exception as error:
            raise PassError(f"onnxruntime cannot run the gradients of {nodes[-1].name!r}: {error}") from error

    def run(
        self, activations: Mapping[str, AnyArray], weights: Mapping[ir.Value, AnyArray], gradient: Float32Array
    ) -> list[Float32Array]:
        """Gradients of the wanted values, in their order."""
        feeds = {name: activations[name] for name in self.activations} | {self._seed: gradient}
        feeds |= {value.name or "": weights[value] for value in self.weights}
        results: list[Float32Array] = self._session.run(None, feeds)
        return results


def _differentiate(copy: GraphCopy, graph: ir.Graph, output: ir.Value, seed: str, wanted: Sequence[ir.Value]) -> None:
    """Make the graph's outputs the gradients of the wanted values."""
    inputs, constants, nodes = len(graph.inputs), set(graph.initializers), len(copy.nodes)
    tape = Tape(copy, wanted)
    given = copy.input(ir.Value(name=seed), ir.DataType.FLOAT)
    tape.accumulate(output, given)
    gradients = tape.backward()
    missing = [value.name for value in wanted if value not in gradients]
    if missing:
        raise PassError(f"{output.name!r} does not depend on {missing[0]!r}")
    graph.inputs.extend(copy.inputs[inputs:])
    for value in copy.initializers:
        if value.name not in constants:
            graph.register_initializer(value)
    graph.extend(copy.nodes[nodes:])
    graph.outputs.clear()
    results = [
        copy.add("Identity", [gradients[value]]) for value in wanted
    ]  # an output stands once, under its own name
    graph.extend(copy.nodes[nodes:])
    for value in results:
        value.dtype = ir.DataType.FLOAT
    graph.outputs.clear()
    graph.outputs.extend(results)


Receiver = Callable[[ir.Value, Float32Array], None]


class Divergence:
    """Implements passes.calibration.Divergence for a model and a reference whose last level can be run next.

    Both walks are over the same chunks; the reference's activations before its last level stay in its store.
    """

    def __init__(self, student: Walk, reference: Walk, wanted: Sequence[ir.Value]) -> None:
        self._reference = _Reference(reference)
        self._walk, self._chunks = student, student.chunks
        self._pieces = [_Piece(piece, wanted, student) for piece in pieces(student.graph, student.shared)]

    @property
    def batches(self) -> int:
        """Chunks of the data."""
        return len(self._chunks)

    def value(self, batch: int, weights: WeightSource) -> float:
        """Mean KL over the batch's positions, in nats."""
        logits = self._forward(self._chunks[batch], weights)[-1]
        return _divergence(self._reference.logits(batch), logits)[0]

    def gradients(self, batch: int, weights: WeightSource, receive: Receiver) -> float:
        """The same; `receive` is given each wanted value's gradient, from the last piece to the first."""
        chunk = self._chunks[batch]
        passed = self._forward(chunk, weights)
        loss, gradient = _divergence(self._reference.logits(batch), passed[-1])
        first = next(at for at, piece in enumerate(self._pieces) if piece.wanted)
        for at in range(len(self._pieces) - 1, first - 1, -1):
            piece = self._pieces[at]
            before, *found = piece.backward(chunk, passed[at], weights, gradient)
            for value, array in zip(piece.wanted, found, strict=True):
                receive(value, array)
            gradient = before
        return loss

    def _forward(self, chunk: Chunk, weights: WeightSource) -> list[Float32Array]:
        """What each piece reads, and the logits at the end."""
        passed: list[Float32Array] = [np.zeros(0, np.float32)]  # the first piece reads token ids alone
        for piece in self._pieces:
            passed.append(piece.forward(chunk, passed[-1], weights))
        return passed


@dataclass
class _Piece:
    """A piece's sessions: one to run it, one for its gradients."""

    piece: Piece
    all_wanted: Sequence[ir.Value]
    walk: Walk
    wanted: list[ir.Value] = field(init=False)
    _forward: GraphRunner = field(init=False)
    _backward: GradientRunner | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        stored, data = set(self.piece.stored), self.walk.data
        self.wanted = [value for value in self.all_wanted if value in stored]
        tokens = data.sequences.shape[1] if data.lengths is None else None
        nodes, output, threads = self.piece.nodes, self.piece.output, self.walk.threads
        self._forward = GraphRunner(nodes, [output], self.walk.shared, tokens, threads, frozenset(self.wanted))
        if self.piece.source is not None:
            wanted = [self.piece.source, *self.wanted]
            self._backward = GradientRunner(nodes, output, wanted, self.walk.shared, tokens, threads)

    def forward(self, chunk: Chunk, x: Float32Array, weights: WeightSource) -> Float32Array:
        runner = self._forward
        result: Float32Array = runner.run(self._feeds(runner, chunk, x), _weights(runner, weights))[0]
        return result

    def backward(
        self, chunk: Chunk, x: Float32Array, weights: WeightSource, gradient: Float32Array
    ) -> list[Float32Array]:
        """Gradients of what the piece reads and of its wanted values."""
        runner = self._backward
        assert runner is not None, "the first piece has a table, no linear layer"
        return runner.run(self._feeds(runner, chunk, x), _weights(runner, weights), gradient)

    def _feeds(self, runner: GraphRunner | GradientRunner, chunk: Chunk, x: Float32Array) -> dict[str, NDArray[Any]]:
        given = {name: chunk.feed(name) for name in runner.activations}
        return {name: x if array is None else array for name, array in given.items()}


def _weights(runner: GraphRunner | GradientRunner, weights: WeightSource) -> Mapping[ir.Value, Float32Array]:
    found = {value: weights(value) for value in runner.weights}
    return {value: float32_values(value) if array is None else array for value, array in found.items()}


class _Reference:
    """The logits to come near to, made anew each time from what the last level reads."""

    def __init__(self, walk: Walk) -> None:
        last = len(walk.levels) - 1
        walk.reach(last)
        self._walk = walk
        self._runner = walk.runner(walk.levels[last].nodes, list(walk.graph.outputs))
        self._weights = {value: float32_values(value) for value in self._runner.weights}

    def logits(self, chunk: int) -> Float32Array:
        """[tokens, vocab]."""
        feeds = self._walk.feeds(self._runner.activations, chunk)
        logits: Float32Array = self._runner.run(feeds, self._weights)[0]
        return logits


def _divergence(reference: Float32Array, logits: Float32Array) -> tuple[float, Float32Array]:
    """Mean over rows of KL(p || q), and its gradient by the logits of q: (q - p) / rows."""
    log_p, log_q = _log_softmax(reference), _log_softmax(logits)
    p = np.exp(log_p)
    total = float(np.einsum("rv,rv->", p, log_p - log_q, dtype=np.float64))
    gradient: Float32Array = ((np.exp(log_q) - p) / len(logits)).astype(np.float32)
    return total / len(logits), gradient


def _log_softmax(logits: Float32Array) -> Float32Array:
    shifted: Float32Array = logits - logits.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted
