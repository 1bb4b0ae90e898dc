"""From a CpuProgram to the structures of launch.h: addresses in the arena, of weights, and of the KV pool.

Program and tensors were checked before, by ingot.artifact.programs.cpu_program_checks; nothing is checked here.
"""

from collections.abc import Sequence
from ctypes import Structure, addressof, c_int32, pointer

import numpy as np
from numpy.typing import NDArray

from ingot.artifact.kv_geometry import SCALE_BYTES
from ingot.artifact.programs.cpu_program import (
    Attend,
    Combine,
    CpuProgram,
    ExpertLayer,
    Experts,
    Linear,
    Operation,
    Recurrent,
)
from ingot.artifact.programs.operation_row import LANES, Matrix, Norm, Packed, Row, RowsOf, View, Writes
from ingot.artifact.programs.stages import LOGITS
from ingot.artifact.safetensors import MappedTensors
from ingot.runtime.cpu.kv_pool import KVPool
from ingot.runtime.cpu.native import abi
from ingot.runtime.cpu.native.attention import place_layer
from ingot.runtime.cpu.native.recurrence import describe
from ingot.runtime.cpu.native.structures import (
    OPERATIONS,
    ExpertsOperation,
    Layer,
    LinearOperation,
    MatrixAt,
    NormOf,
    OperationAt,
    RankPart,
    ViewAt,
)
from ingot.runtime.cpu.native.tensor_parallel import Heads, Part, Rank, part_of
from ingot.runtime.cpu.state_pool import StatePool
from ingot.runtime.forward_batch import FloatArray
from ingot.sizes import round_up

FLOAT_BYTES = 4
ALIGNMENT = 64  # of tiles


class BoundOperations:
    """The operations of a program as structures, which refer to memory that this object keeps.

    arena    the arena's memory, for steps of up to `rows` tokens
    pool     of a program with attention
    states   of a program with recurrent layers
    rank     of a group of processes that compute the program together; None: this process alone
    linears  the linear layers, experts' included
    parts    what the rank makes of each operation
    """

    def __init__(
        self,
        program: CpuProgram,
        weights: MappedTensors,
        arena: FloatArray,
        rows: int,
        pool: KVPool | None,
        states: StatePool | None = None,
        rank: Rank | None = None,
    ) -> None:
        self._program, self._weights, self._pool, self._states = program, weights, pool, states
        self._rank = rank
        self._arena, self._rows = arena, rows
        self._held: list[object] = [arena, pool, states]
        self.linears: list[LinearOperation] = []
        self._logits_views: list[tuple[Structure, str, int]] = []  # operation, name of its view, first column
        self._matrices = {name: self._matrix(name, matrix) for name, matrix in program.matrices.items()}
        bound = [self._bind(operation) for operation in program.operations]
        self._held.append(bound)
        self.array = (OperationAt * len(bound))(*(OperationAt(kind, addressof(arguments)) for kind, arguments in bound))
        self.parts = (RankPart * len(bound))(*(self._part(operation) for operation in program.operations))

    def place_logits(self, logits: FloatArray) -> None:
        """Let the operations write logits [rows, vocabulary], C-contiguous, to this memory from now on."""
        for operation, name, column in self._logits_views:
            getattr(operation, name).at = logits.ctypes.data + column * FLOAT_BYTES
        self._logits = logits

    def rows_of(self, name: str) -> FloatArray:
        """Return a buffer of the arena as an array [rows, columns], for the rows of the largest step."""
        buffer, row_floats = self._program.buffers[name], round_up(self._program.buffers[name].columns, LANES)
        first = buffer.offset * self._rows
        whole = self._arena[first : first + row_floats * self._rows].reshape(self._rows, row_floats)
        return whole[:, : buffer.columns]

    def _bind(self, operation: Operation) -> tuple[int, Structure]:
        return abi.OPERATION[operation.kind], self._arguments(operation)

    def _arguments(self, operation: Operation) -> Structure:
        match operation:
            case Attend():
                return self._attend(operation)
            case Experts():
                return self._experts(operation)
            case Linear():
                return self._layer(operation)
            case _ if isinstance(operation, Recurrent):
                assert self._states is not None
                _, bound = describe(operation, self._states)
            case _:
                bound = OPERATIONS[abi.c_name(operation.kind)]()
        self._fill(bound, operation)
        if isinstance(operation, Combine) and operation.vector is not None:
            # Of stride 0: the same for all rows.
            bound.b = ViewAt(self._floats(operation.vector), 0, False)
        return bound

    def _fill(self, bound: Structure, row: Row) -> None:
        """Set the structure's fields from those of the row."""
        abi.set_numbers(bound, row)
        if numbers := getattr(row, "numbers", ()):
            bound.numbers[: len(numbers)] = numbers
        roles = row.roles()
        for name in [name for name, *_ in bound._fields_ if name in roles]:
            match getattr(row, name):
                case View() as view:
                    self._place(bound, name, view, row.computed_rows)
                case float(number):
                    bound.number = number
                case Norm() as norm:
                    bound.norm = self._norm(norm)
                case str(matrix) if isinstance(roles[name], Packed):
                    setattr(bound, name, pointer(self._matrices[matrix]))
                case str(tensor):
                    setattr(bound, name, self._floats(tensor))

    def _layer(self, layer: Linear | ExpertLayer) -> LinearOperation:
        bound = LinearOperation()
        self._fill(bound, layer)
        self.linears.append(bound)
        return bound

    def _experts(self, operation: Experts) -> ExpertsOperation:
        count = len(operation.up)
        gated = self._program.matrices[operation.up[0].matrix].pairs
        up, down = ([self._layer(layer) for layer in layers] for layers in (operation.up, operation.down))
        for layer in up:
            layer.norm, layer.store = self._norm(operation.norm), abi.FIELD_ENUMS["store"]["gate" if gated else "store"]
        layers = (LinearOperation * count)(*up), (LinearOperation * count)(*down)
        self._held += [up, down, *layers]
        bound = ExpertsOperation(up=layers[0], down=layers[1])
        self._fill(bound, operation)
        return bound

    def _attend(self, operation: Attend) -> Layer:
        assert self._pool is not None
        bound = Layer(self._pool.blocks.ctypes.data)
        place_layer(bound, self._pool.geometry, operation.layer)
        for name in ("query", "key", "value", "output"):
            view = getattr(operation, name)
            if view is not None:
                at = self._view(view, "tokens")
                setattr(bound, name, at.at)
                setattr(bound, f"{name}_stride", at.stride)
        bound.cos, bound.sin = self._floats(operation.cos), self._floats(operation.sin)
        bound.sinks = self._floats(operation.sinks)
        abi.set_numbers(bound, operation)
        bound.dim, bound.value_dim = operation.head_dim, operation.output_dim
        part = self._part_of(operation)
        if part is not None and part.heads is not None:
            self._keep_heads(bound, operation.layer, part.heads)
        return bound

    def _keep_heads(self, bound: Layer, layer: int, heads: Heads) -> None:
        """Let a layer attend with some heads, as if it had no others."""
        assert self._pool is not None
        own, first, first_kv = self._pool.geometry.layers[layer], heads.queries.start, heads.kv.start
        vectors = first_kv * self._pool.geometry.block_tokens
        bound.keys += vectors * own.key_bytes
        bound.values += vectors * own.value_bytes
        bound.key_scales += vectors * own.scales_of_key * SCALE_BYTES
        bound.value_scales += vectors * own.scales_of_value * SCALE_BYTES
        strides = {"query": first * bound.dim, "output": first * bound.value_dim, "sinks": first}
        strides |= {"key": first_kv * bound.dim, "value": first_kv * bound.value_dim}
        for name, floats in strides.items():
            if (at := getattr(bound, name)) is not None:
                setattr(bound, name, at + floats * FLOAT_BYTES)
        bound.num_heads, bound.num_kv_heads = len(heads.queries), len(heads.kv)
        bound.writes = bound.writes and heads.writes

    def _part_of(self, operation: Operation) -> Part | None:
        return None if self._rank is None else part_of(operation, self._program.matrices, self._rank)

    def _part(self, operation: Operation) -> RankPart:
        part = self._part_of(operation)
        if part is None:
            return RankPart()
        ((view, _),) = operation.named(Writes)
        at = self._view(view, operation.computed_rows)
        return RankPart(
            bounds=self._integers(part.bounds),
            owners=None if part.owners is None else self._integers(part.owners),
            output=at.at,
            stride=at.stride,
            rows=abi.ROWS_OF[operation.computed_rows],
            first=part.tiles.start,
            count=len(part.tiles),
            shares_keys=part.shares_keys,
        )

    def _integers(self, numbers: Sequence[int]) -> int:
        array = (c_int32 * len(numbers))(*numbers)
        self._held.append(array)
        return addressof(array)

    def _place(self, bound: Structure, name: str, view: View, rows: RowsOf) -> None:
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


def aligned_copy(content: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Copy bytes to an address at which tiles may begin."""
    raw = np.empty(content.nbytes + ALIGNMENT, np.uint8)
    begin = -raw.ctypes.data % ALIGNMENT
    copy = raw[begin : begin + content.nbytes].reshape(content.shape)
    copy[:] = content
    return copy
