"""From a CpuProgram to the structures of launch.h: addresses in the arena, of weights, and of the KV pool.

Program and tensors were checked before, by ingot.artifact.programs.cpu_program_checks; nothing is checked here.
"""

from ctypes import Array, Structure, addressof, c_float, pointer

import numpy as np
from numpy.typing import NDArray

from ingot.artifact.programs.cpu_program import (
    ApplyDeltaRule,
    Attend,
    Combine,
    Convolve,
    CpuProgram,
    Embed,
    ExpertLayer,
    Experts,
    Linear,
    Normalize,
    Operation,
    Recurrent,
    Rotate,
    Scan,
)
from ingot.artifact.programs.operation_row import (
    LANES,
    Matrix,
    Norm,
    RowsOf,
    View,
)
from ingot.artifact.safetensors import MappedTensors
from ingot.runtime.cpu.kv_pool import KVPool
from ingot.runtime.cpu.native import abi
from ingot.runtime.cpu.native.attention import place_layer
from ingot.runtime.cpu.native.recurrence import describe
from ingot.runtime.cpu.native.structures import (
    CombineOperation,
    EmbedOperation,
    ExpertsOperation,
    Layer,
    LinearOperation,
    MatrixAt,
    NormalizeOperation,
    NormOf,
    OperationAt,
    RotateOperation,
    ViewAt,
)
from ingot.runtime.cpu.state_pool import StatePool
from ingot.runtime.forward_batch import FloatArray
from ingot.sizes import round_up

LOGITS = "logits"
FLOAT_BYTES = 4
ALIGNMENT = 64  # of tiles


class BoundOperations:
    """The operations of a program as structures, which refer to memory that this object keeps.

    arena    the arena's memory, for steps of up to `rows` tokens
    states   of a program with recurrent layers
    linears  the linear layers, experts' included
    """

    def __init__(
        self,
        program: CpuProgram,
        weights: MappedTensors,
        arena: FloatArray,
        rows: int,
        pool: KVPool,
        states: StatePool | None = None,
    ) -> None:
        self._program, self._weights, self._pool, self._states = program, weights, pool, states
        self._arena, self._rows = arena, rows
        self._held: list[object] = [arena, pool, states]
        self.linears: list[LinearOperation] = []
        self._logits_views: list[tuple[Structure, str, int]] = []  # operation, name of its view, first column
        self._matrices = {name: self._matrix(name, matrix) for name, matrix in program.matrices.items()}
        bound = [self._bind(operation) for operation in program.operations]
        self._held.append(bound)
        self.array = (OperationAt * len(bound))(*(OperationAt(kind, addressof(arguments)) for kind, arguments in bound))

    def place_logits(self, logits: FloatArray) -> None:
        """Let the operations write logits [rows, vocabulary], C-contiguous, to this memory from now on."""
        for operation, name, column in self._logits_views:
            getattr(operation, name).at = logits.ctypes.data + column * FLOAT_BYTES
        self._logits = logits

    def _bind(self, operation: Operation) -> tuple[int, Structure]:
        return abi.OPERATION[operation.kind], self._arguments(operation)

    def _arguments(self, operation: Operation) -> Structure:
        match operation:
            case Embed():
                return self._embed(operation)
            case Linear():
                return self._linear(operation)
            case Normalize():
                return self._normalize(operation)
            case Combine():
                return self._combine(operation)
            case Rotate():
                return self._rotate(operation)
            case Attend():
                return self._attend(operation)
            case Experts():
                return self._experts(operation)
            case Convolve() | ApplyDeltaRule() | Scan():
                return self._recurrent(operation)

    def _embed(self, operation: Embed) -> EmbedOperation:
        bound = EmbedOperation(
            table=pointer(self._matrices[operation.table]),
            scale=operation.scale,
            by_position=operation.ids == "position_ids",
            adds=operation.adds,
        )
        self._place(bound, "tokens", output=operation.output)
        return bound

    def _linear(self, operation: Linear) -> LinearOperation:
        bound = self._layer(operation, operation.norm, abi.STORE[operation.store])
        bound.of_logits = abi.ROWS_OF[operation.rows]
        self._place(bound, operation.rows, input=operation.input, output=operation.output)
        return bound

    def _layer(self, layer: Linear | ExpertLayer, norm: Norm | None, store: int) -> LinearOperation:
        """A linear layer without its views."""
        bound = LinearOperation(
            matrix=pointer(self._matrices[layer.matrix]),
            bias=self._floats(layer.bias),
            norm=self._norm(norm),
            rounding=abi.ROUNDING[layer.rounding],
            store=store,
            activation=abi.ACTIVATION[layer.activation],
            static_scale=layer.static_scale or 0.0,
            alpha=layer.alpha,
            cap=layer.cap,
            numbers=_four(layer.numbers),
        )
        self.linears.append(bound)
        return bound

    def _experts(self, operation: Experts) -> ExpertsOperation:
        count = len(operation.up)
        gated = self._program.matrices[operation.up[0].matrix].pairs
        up = [self._layer(layer, operation.norm, abi.STORE["gate" if gated else "store"]) for layer in operation.up]
        down = [self._layer(layer, None, abi.STORE["store"]) for layer in operation.down]
        layers = (LinearOperation * count)(*up), (LinearOperation * count)(*down)
        self._held += [up, down, *layers]
        bound = ExpertsOperation(
            bias=self._floats(operation.bias),
            up=layers[0],
            down=layers[1],
            count=count,
            chosen=operation.chosen,
            score=abi.SCORE[operation.score],
            groups=operation.groups,
            chosen_groups=operation.chosen_groups,
            group_best=operation.group_best,
            normalise=operation.normalise,
            adds=operation.adds,
            of_logits=abi.ROWS_OF[operation.rows],
            least_sum=operation.least_sum,
            scale=operation.scale,
        )
        self._place(bound, operation.rows, logits=operation.logits, input=operation.input, output=operation.output)
        return bound

    def _normalize(self, operation: Normalize) -> NormalizeOperation:
        bound = NormalizeOperation(
            norm=self._norm(operation.norm),
            columns=operation.columns,
            groups=operation.groups,
            of_logits=abi.ROWS_OF[operation.rows],
        )
        views = {"input": operation.input, "output": operation.output, "residual": operation.residual}
        self._place(bound, operation.rows, **views)
        return bound

    def _combine(self, operation: Combine) -> CombineOperation:
        number = operation.b if isinstance(operation.b, float) else 0.0
        bound = CombineOperation(
            kind=abi.COMBINATION[operation.function],
            activation=abi.ACTIVATION[operation.activation],
            columns=operation.columns,
            broadcast=operation.broadcast,
            of_logits=abi.ROWS_OF[operation.rows],
            number=number,
            scale=operation.scale,
            cap=operation.cap,
            numbers=_four(operation.numbers),
        )
        b = operation.b if isinstance(operation.b, View) else None
        self._place(bound, operation.rows, a=operation.a, b=b, output=operation.output)
        if operation.vector is not None:
            bound.b = ViewAt(self._floats(operation.vector), 0, False)  # of stride 0: the same for all rows
        return bound

    def _rotate(self, operation: Rotate) -> RotateOperation:
        bound = RotateOperation(
            cos=self._floats(operation.cos),
            sin=self._floats(operation.sin),
            heads=operation.heads,
            dim=operation.head_dim,
            half=operation.rotary_dim // 2,
        )
        self._place(bound, "tokens", input=operation.input, output=operation.output)
        return bound

    def _attend(self, operation: Attend) -> Layer:
        bound = Layer(self._pool.blocks.ctypes.data)
        place_layer(bound, self._pool.geometry, operation.layer)
        for name in ("query", "key", "value", "output"):
            view = getattr(operation, name)
            if view is not None:
                at = self._view(view, "tokens")
                setattr(bound, name, at.at)
                setattr(bound, f"{name}_stride", at.stride)
        bound.rotary_dim = operation.rotary_dim
        bound.cos, bound.sin = self._floats(operation.cos), self._floats(operation.sin)
        bound.sinks = self._floats(operation.sinks)
        bound.num_heads, bound.num_kv_heads = operation.num_heads, operation.num_kv_heads
        bound.dim, bound.value_dim = operation.head_dim, operation.output_dim
        bound.window, bound.scale, bound.softcap = operation.window, operation.scale, operation.softcap
        bound.arithmetic = abi.ARITHMETIC[operation.arithmetic]
        return bound

    def _recurrent(self, operation: Recurrent) -> Structure:
        assert self._states is not None
        _, bound = describe(operation, self._states)
        self._place(bound, "tokens", **{name: getattr(operation, name) for name in operation.widths})
        match operation:
            case Convolve(weight=weight, bias=bias):
                bound.weight, bound.bias = self._floats(weight), self._floats(bias)
            case Scan(a=a, d=d):
                bound.a, bound.d = self._floats(a), self._floats(d)
        return bound

    def _place(self, bound: Structure, rows: RowsOf, **views: View | None) -> None:
        for name, view in views.items():
            if view is None:
                continue
            setattr(bound, name, self._view(view, rows))
            if view.buffer == LOGITS:
                self._logits_views.append((bound, name, view.column))

    def _view(self, view: View, rows: RowsOf) -> ViewAt:
        """Where an operation that computes such rows reads or writes."""
        buffer = self._program.buffers[view.buffer]
        if view.buffer == LOGITS:
            return ViewAt(None, buffer.columns, False)
        first = self._arena.ctypes.data + buffer.offset * self._rows * FLOAT_BYTES
        at, stride = first + view.column * FLOAT_BYTES, round_up(buffer.columns, LANES)
        return ViewAt(at, stride, buffer.rows != rows)

    def _norm(self, norm: Norm | None) -> NormOf:
        if norm is None:
            return NormOf()
        return NormOf(self._floats(norm.weight), self._floats(norm.bias), norm.epsilon, abi.NORM[norm.kind])

    def _matrix(self, name: str, matrix: Matrix) -> MatrixAt:
        tiles = self._weights.view(name)
        return MatrixAt(
            tiles=self._hold(tiles if tiles.ctypes.data % ALIGNMENT == 0 else aligned_copy(tiles)),
            tile_bytes=matrix.tile_bytes,
            codes_offset=matrix.codes_offset,
            n=matrix.n,
            k=matrix.k,
            padded_k=matrix.padded_k,
            form=abi.FORM[matrix.form],
            block=matrix.block,
            scale_blocks=matrix.scale_blocks,
            scale_bytes=matrix.scale_bytes,
            has_zeros=matrix.has_zeros,
        )

    def _floats(self, name: str | None) -> int | None:
        """Address of a tensor of floats."""
        return None if name is None else self._hold(self._weights.view(name))

    def _hold(self, content: NDArray[np.uint8]) -> int:
        self._held.append(content)
        return int(content.ctypes.data)


def _four(numbers: tuple[float, ...]) -> Array[c_float]:
    """The numbers of an activation, as the structures have them."""
    return (c_float * 4)(*numbers)


def aligned_copy(content: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Copy bytes to an address that tiles may have."""
    raw = np.empty(content.nbytes + ALIGNMENT, np.uint8)
    begin = -raw.ctypes.data % ALIGNMENT
    copy = raw[begin : begin + content.nbytes].reshape(content.shape)
    copy[:] = content
    return copy
