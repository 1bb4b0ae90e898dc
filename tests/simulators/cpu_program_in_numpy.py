"""A CPU launch program in numpy: what the engine's kernels compute, from the files that they read.

Reads program/operations.json and program/weights.safetensors of a folder. Buffers are at their places in one arena,
which begins as NaN, so that a wrong memory plan shows. Codes are rounded, multiplied and scaled with the arithmetic of
runtime/cpu/native/launch.h, bit for bit; norms, activations and attention are within some last bits, because their
order of sums is the kernels' own.
"""

import math
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingot.artifact import AttentionStep
from ingot.artifact.programs.cpu_program import (
    OPERATIONS_FILE,
    WEIGHTS_FILE,
    Attend,
    Combine,
    Embed,
    ExpertLayer,
    Experts,
    Linear,
    Normalize,
    Operation,
    Rotate,
    read_cpu_program,
)
from ingot.artifact.programs.operation_row import (
    LANES,
    Matrix,
    Norm,
    RowsOf,
    View,
)
from ingot.artifact.safetensors import MappedTensors
from ingot.passes.numerics.activation_rounding import LEAST_PEAK
from ingot.passes.numerics.experts import Routing, combine, dispatch, route
from ingot.pipeline.targets.cpu.packing import MatrixArrays, default_zero, unpack_tiles
from ingot.runtime.adapters import Adapter
from ingot.runtime.cpu.attention_operands import AttentionOperands, RotaryOperands
from ingot.runtime.cpu.kv_pool import KVPool
from ingot.runtime.cpu.native.numpy_attention import NumpyAttention
from ingot.runtime.forward_batch import ForwardBatch
from ingot.sizes import round_up

Floats = NDArray[np.float32]
LOGITS = "logits"


class NumpyCpuProgram:
    """One program, its weights and a KV pool. `forward` runs a step.

    rounds    False leaves activations before integer weights as they are, to show everything else exactly; activations
              that a pass rounded (per token, static) are rounded always
    """

    def __init__(self, folder: Path, num_blocks: int, *, rounds: bool = True) -> None:
        self.rounds = rounds
        self.program = read_cpu_program(folder / OPERATIONS_FILE)
        self._tensors = MappedTensors(folder / WEIGHTS_FILE)
        self._pool = KVPool(self.program.kv, num_blocks)
        self._attention = NumpyAttention(self._pool)
        self._matrices: dict[str, MatrixArrays] = {}
        self.adapters: dict[int, Adapter] = {}
        """By slot: `ForwardBatch.adapter_slots`."""

    def forward(self, batch: ForwardBatch) -> Floats:
        """Logits [R, vocab] of a step; the operations of the head are left out of a step without logits."""
        step = _Step(self, batch)
        self._attention.begin(batch)
        operations = self.program.operations
        for operation in operations if len(batch.logits_indices) else operations[: self.program.head_start]:
            step.run(operation)
        return step.view(View(buffer=LOGITS), self.program.vocab_size)

    def matrix(self, name: str) -> MatrixArrays:
        """The values of a packed matrix."""
        if name not in self._matrices:
            matrix = self.program.matrices[name]
            tiles = self._tensors.view(name).reshape(matrix.num_tiles, matrix.tile_bytes)
            self._matrices[name] = unpack_tiles(matrix, tiles)
        return self._matrices[name]

    def tensor(self, name: str) -> Floats:
        """A float tensor."""
        assert self._tensors.tensors[name].dtype == "F32"
        return self._tensors.view(name).view(np.float32).reshape(self._tensors.tensors[name].shape)

    def attend(self, operation: Attend, operands: AttentionOperands, output: Floats) -> None:
        """Write keys and values into the pool, and attend."""
        assert operation.arithmetic == "float32", "numpy attention has no other"
        rotation = None
        if operation.cos is not None and operation.sin is not None:
            rotation = RotaryOperands(self.tensor(operation.cos), self.tensor(operation.sin))
        names = ("layer", "num_heads", "num_kv_heads", "head_dim", "scale", "softcap", "window")
        facts = {name: getattr(operation, name) for name in names}
        step = AttentionStep(query="q", key="k", value="v", output="o", **facts)
        sinks = None if operation.sinks is None else self.tensor(operation.sinks)
        self._attention.bind(step, operands, output, rotation, sinks)()


class _Step:
    """The arena of one step."""

    def __init__(self, owner: NumpyCpuProgram, batch: ForwardBatch) -> None:
        self.owner, self.program, self.batch = owner, owner.program, batch
        self.counts: Mapping[str, int] = {"tokens": batch.num_tokens, "logits": len(batch.logits_indices)}
        self.arena: Floats = np.full(self.program.arena_floats * batch.num_tokens, np.nan, np.float32)
        self.logits: Floats = np.full((self.counts["logits"], self.program.vocab_size), np.nan, np.float32)

    def view(self, view: View, columns: int) -> Floats:
        """Columns of a buffer's rows, in the arena itself."""
        buffer = self.program.buffers[view.buffer]
        rows = self.counts[buffer.rows]
        if view.buffer == LOGITS:
            return self.logits[:, view.column : view.column + columns]
        stride, at = round_up(buffer.columns, LANES), buffer.offset * self.counts["tokens"]
        whole = self.arena[at : at + rows * stride].reshape(rows, stride)
        return whole[:, view.column : view.column + columns]

    def run(self, operation: Operation) -> None:
        """Compute one operation."""
        match operation:
            case Embed():
                self._embed(operation)
            case Linear():
                self._linear(operation)
            case Normalize():
                self._normalize(operation)
            case Combine():
                self._combine(operation)
            case Rotate():
                self._rotate(operation)
            case Attend():
                self._attend(operation)
            case Experts():
                self._experts(operation)

    def _gathered(self, view: View, columns: int, rows: RowsOf) -> Floats:
        """A view, or its rows of logits where its buffer has rows of tokens."""
        x = self.view(view, columns)
        return x if self.program.buffers[view.buffer].rows == rows else x[self.batch.logits_indices]

    def _output(self, operation: Operation) -> Floats:
        return self.view(operation.output, operation.span_written(self.program.matrices).columns)

    def _embed(self, operation: Embed) -> None:
        ids = self.batch.input_ids if operation.ids == "input_ids" else self.batch.position_ids
        out = self._output(operation)
        rows = table_rows(self.program.matrices[operation.table], self.owner.matrix(operation.table), ids)
        scaled = rows * np.float32(operation.scale)
        out[:] = out + scaled if operation.adds else scaled

    def _linear(self, operation: Linear) -> None:
        x = self._gathered(operation.input, self.program.matrices[operation.matrix].k, operation.rows)
        if operation.norm is not None:
            x = self._normed(x, operation.norm)
        y, out = self._multiplied(x, operation, self._added(x, operation)), self._output(operation)
        if operation.store == "gate":
            gate, up = np.split(y, 2, axis=1)
            out[:] = gated(gate, up, operation)
        else:
            y = activated(y, operation.activation, operation.numbers)
            out[:] = out + y if operation.store == "add" else y

    def _experts(self, operation: Experts) -> None:
        hidden = self.program.matrices[operation.up[0].matrix].k
        logits = self._gathered(operation.logits, len(operation.up), operation.rows)
        x = self._gathered(operation.input, hidden, operation.rows)
        if operation.norm is not None:
            x = self._normed(x, operation.norm)
        names = (field.name for field in fields(Routing))
        routing = Routing(**{name: getattr(operation, name) for name in names})
        bias = None if operation.bias is None else self.owner.tensor(operation.bias)
        ids, weights = route(logits, routing, bias)
        results = []
        rows_of_experts = dispatch(x, ids, len(operation.up))
        for rows, up, down in zip(rows_of_experts, operation.up, operation.down, strict=True):
            y = self._multiplied(rows, up)
            if self.program.matrices[up.matrix].pairs:
                gate, factor = np.split(y, 2, axis=1)
                y = gated(gate, factor, up)
            else:
                y = activated(y, up.activation, up.numbers)
            results.append(self._multiplied(y, down))
        out, total = self._output(operation), combine(ids, weights, results)
        out[:] = out + total if operation.adds else total

    def _added(self, x: Floats, operation: Linear) -> Floats:
        """B (A x) [rows, n] of each row's adapter, in float64; 0 for rows without one, and in columns left alone."""
        added = np.zeros((len(x), self.program.matrices[operation.matrix].n))
        if self.batch.adapter_slots is not None:
            slots = np.repeat(self.batch.adapter_slots, np.diff(self.batch.query_starts))  # of tokens
            slots = slots if operation.rows == "tokens" else slots[self.batch.logits_indices]
            for row in np.flatnonzero(slots >= 0):
                for low in self.owner.adapters[slots[row]].changes.get(operation.node, ()):
                    here = slice(low.first_row, low.first_row + len(low.b))
                    added[row, here] += low.b.astype(np.float64) @ (low.a @ x[row].astype(np.float64))
        return added.astype(np.float32)

    def _multiplied(self, x: Floats, operation: Linear | ExpertLayer, added: Floats | float = 0.0) -> Floats:
        """The capped result of a linear layer; `added` to its sums."""
        matrix, arrays = self.program.matrices[operation.matrix], self.owner.matrix(operation.matrix)
        if operation.rounding == "block" and not self.owner.rounds:
            y = x @ table_rows(matrix, arrays, np.arange(matrix.n)).T
        else:
            y = matmul(matrix, arrays, x, operation)
        y = (y + np.float32(added)) * np.float32(operation.alpha)
        if operation.bias is not None:
            y = y + self.owner.tensor(operation.bias)
        return capped(y, operation.cap)

    def _normalize(self, operation: Normalize) -> None:
        width = operation.columns * operation.groups
        views = (view for view in (operation.input, operation.residual) if view is not None)
        parts = [self._gathered(view, width, operation.rows) for view in views]
        x = parts[0].reshape(len(parts[0]), operation.groups, operation.columns)
        normed = self._normed(x, operation.norm).reshape(len(x), width)
        self._output(operation)[:] = normed + parts[1] if len(parts) > 1 else normed

    def _normed(self, x: Floats, norm: Norm) -> Floats:
        weight = self.owner.tensor(norm.weight)
        if norm.kind == "layer":
            x = x - x.mean(axis=-1, keepdims=True)
        scale = 1 / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + np.float32(norm.epsilon))
        normed: Floats = x * scale * weight
        return normed if norm.bias is None else normed + self.owner.tensor(norm.bias)

    def _combine(self, operation: Combine) -> None:
        a, b = self._gathered(operation.a, operation.columns, operation.rows), self._second(operation)
        match operation.function:
            case "copy":
                result = a
            case "add":
                result = a + b
            case "multiply":
                result = a * b
            case "gate":
                result = gated(a, b, operation)
        self._output(operation)[:] = capped(result * np.float32(operation.scale), operation.cap)

    def _second(self, operation: Combine) -> Any:
        if isinstance(operation.b, View):
            columns = 1 if operation.broadcast else operation.columns
            return self._gathered(operation.b, columns, operation.rows)
        return None if operation.b is None else np.float32(operation.b)

    def _rotate(self, operation: Rotate) -> None:
        x = self.view(operation.input, operation.heads * operation.head_dim)
        rotation = RotaryOperands(self.owner.tensor(operation.cos), self.owner.tensor(operation.sin))
        heads = x.reshape(len(x), operation.heads, operation.head_dim)
        self._output(operation)[:] = rotation.apply(heads, self.batch.position_ids).reshape(x.shape)

    def _attend(self, operation: Attend) -> None:
        width = operation.num_kv_heads * operation.head_dim
        query = self.view(operation.query, operation.num_heads * operation.head_dim)
        key, value = (None if at is None else self.view(at, width) for at in (operation.key, operation.value))
        self.owner.attend(operation, AttentionOperands(query, key, value), self._output(operation))


def table_rows(matrix: Matrix, arrays: MatrixArrays, ids: NDArray[np.int64]) -> Floats:
    """Rows of a matrix as floats: (code - zero) * scale."""
    codes: Floats = arrays.codes[ids].astype(np.float32)
    if arrays.scales is None:
        return codes
    scales = _by_column(matrix, arrays.scales[ids])
    if not matrix.is_integer:
        return np.asarray(codes * scales, np.float32)
    zeros = default_zero(matrix) if arrays.zero_points is None else _by_column(matrix, arrays.zero_points[ids])
    return np.asarray((codes - np.asarray(zeros, np.float32)) * scales, np.float32)


def matmul(matrix: Matrix, arrays: MatrixArrays, x: Floats, operation: Linear | ExpertLayer) -> Floats:
    """x [m, k] @ W^T: [m, n], with x rounded as the operation says."""
    if operation.rounding == "none":
        return _float_matmul(arrays, x)
    codes, scales = rounded(x, operation, matrix.block)  # [m, k], [m, blocks of x]
    zeros = default_zero(matrix) if arrays.zero_points is None else _by_column(matrix, arrays.zero_points)
    weights = arrays.codes.astype(np.int64) - zeros
    assert arrays.scales is not None
    is_one_block = matrix.per_row and operation.rounding != "block"
    block = matrix.k if is_one_block else matrix.block
    out = np.zeros((len(x), matrix.n), np.float32)
    for index, start in enumerate(range(0, matrix.k, block)):
        columns = slice(start, start + block)
        sums = codes[:, columns].astype(np.int64) @ weights[:, columns].T
        scale = arrays.scales[:, 0 if matrix.per_row else index] * scales[:, 0 if is_one_block else index, None]
        out = fma(sums.astype(np.float32), scale, out)
    return out


def rounded(x: Floats, operation: Linear | ExpertLayer, block: int) -> tuple[NDArray[np.int8], Floats]:
    """Codes [m, k] of x, and their scales [m, blocks]."""
    blocks = -(-x.shape[1] // block)
    padded = np.pad(x, ((0, 0), (0, blocks * block - x.shape[1]))).reshape(len(x), blocks, block)
    if operation.rounding == "static":
        assert operation.static_scale is not None
        scales = np.full((len(x), blocks, 1), operation.static_scale, np.float32)
    else:
        axes = (1, 2) if operation.rounding == "token" else (2,)
        peaks = np.maximum(np.abs(padded).max(axis=axes, keepdims=True), LEAST_PEAK)
        scales = np.broadcast_to(peaks / np.float32(127), (len(x), blocks, 1))
    codes = np.clip(np.rint(padded / scales), -128, 127).astype(np.int8)
    return codes.reshape(len(x), -1)[:, : x.shape[1]], scales[:, :, 0]


def _float_matmul(arrays: MatrixArrays, x: Floats) -> Floats:
    weights = arrays.codes.astype(np.float32)
    out = np.zeros((len(x), len(weights)), np.float32)
    for column in range(x.shape[1]):
        out = fma(x[:, column, None], weights[:, column], out)
    return out if arrays.scales is None else out * arrays.scales[:, 0]


def fma(a: Floats, b: Floats, c: Floats) -> Floats:
    """a * b + c, rounded once.

    a * b is exact in float64. The sum is rounded to odd there, so that rounding it to float32 is
    the only rounding (Boldo and Melquiond, Emulation of a FMA and correctly rounded sums, 2008).
    """
    exact, addend = np.asarray(a, np.float64) * b, np.asarray(c, np.float64)
    total = exact + addend
    back = total - exact
    error = (exact - (total - back)) + (addend - back)  # TwoSum: the exact rest
    is_even = (total.view(np.int64) & 1) == 0
    towards = np.where(error > 0, np.inf, -np.inf)
    odd = np.where((error != 0) & is_even, np.nextafter(total, towards), total)
    result: Floats = odd.astype(np.float32)
    return result


def gated(gate: Floats, up: Any, operation: Linear | ExpertLayer | Combine) -> Floats:
    """activation(gate) * up."""
    if operation.activation != "clamped-swiglu":
        return np.asarray(activated(gate, operation.activation, operation.numbers) * up)
    alpha, limit = map(np.float32, operation.numbers)
    g, u = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return np.asarray(g / (1 + np.exp(-alpha * g)) * (u + 1), np.float32)


def activated(x: Floats, name: str, numbers: tuple[float, ...] = ()) -> Floats:
    """The activation of that name."""
    with np.errstate(over="ignore"):
        match name:
            case "silu":
                return np.asarray(x / (1 + np.exp(-x)), np.float32)
            case "gelu-erf":
                return np.asarray(x * (1 + _erf(x / np.sqrt(2))) / 2, np.float32)
            case "gelu-tanh":
                inner = np.sqrt(2 / np.pi) * (x + 0.044715 * x.astype(np.float64) ** 3)
                return np.asarray(x * (1 + np.tanh(inner)) / 2, np.float32)
            case "relu":
                return np.maximum(x, np.float32(0))
            case "relu2":
                return np.square(np.maximum(x, np.float32(0)))
            case "sigmoid":
                return np.asarray(1 / (1 + np.exp(-x)), np.float32)
            case "tanh":
                return np.asarray(np.tanh(x), np.float32)
            case "clamp":
                least, most = map(np.float32, numbers)
                return np.asarray(np.clip(x, least, most), np.float32)
            case "xielu":
                a, b, beta, eps = map(np.float32, numbers)
                bent = np.where(x > 0, a * x * x, b * (np.expm1(np.minimum(x, eps)) - x))
                return np.asarray(bent + beta * x, np.float32)
    assert name == "none", name
    return x


def capped(x: Floats, cap: float) -> Floats:
    """cap * tanh(x / cap); x where the cap is 0."""
    return np.float32(cap) * np.tanh(x / np.float32(cap)) if cap else x


def _erf(x: NDArray[Any]) -> NDArray[np.float64]:
    return np.array([math.erf(value) for value in x.reshape(-1)]).reshape(x.shape)


def _by_column(matrix: Matrix, values: NDArray[Any]) -> NDArray[Any]:
    """[rows, blocks] -> [rows, k]."""
    return values if matrix.per_row else np.repeat(values, matrix.block, axis=1)[:, : matrix.k]
