"""KL divergence of a model from a reference on calibration data, and its gradients by any stored values.

The model runs piece by piece (residual_cuts.py); only what passes between pieces is kept of the way there, and each
piece runs once more on the way back, so that one piece's activations and weights are in memory at a time.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.passes.calibration import Float32Array, WeightSource
from ingot.passes.weight_values import float32_values
from ingot.pipeline.calibrate.chunks import Chunk
from ingot.pipeline.calibrate.gradient_runner import GradientRunner
from ingot.pipeline.calibrate.graph_runner import GraphRunner
from ingot.pipeline.calibrate.residual_cuts import Piece, pieces
from ingot.pipeline.calibrate.walk import Walk

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
