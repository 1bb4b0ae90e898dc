"""What each rank of a group of processes computes of a program's operations: the parts that tensor_parallel.h walks.

    linear               whole tiles of output columns; small ones every rank makes
    experts              columns of every expert, or whole experts by their owner
    attend               KV heads with their queries; ranks beyond the KV heads share one, and divide its queries
    convolve             tiles of channels
    delta-rule, scan     heads
    the rest             every rank; what is done to logits, which are in memory that all share, the first

No sum is divided, so the bits are those of one process; Shoeybi et al. 2019 (arXiv:1909.08053) divide every second one.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ingot.artifact.programs.cpu_program import (
    ApplyDeltaRule,
    Attend,
    Convolve,
    CpuProgram,
    Embed,
    Experts,
    Linear,
    Operation,
    Scan,
)
from ingot.artifact.programs.operation_row import LANES, Matrices
from ingot.artifact.programs.recurrent import CHANNEL_TILE, STATE_TILE
from ingot.artifact.programs.stages import LOGITS
from ingot.sizes import ceil_div

LINE_BYTES = 64
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class Rank:
    """A process of a group.

    owners                  the rank of each expert by node; of nodes that it lacks every rank has columns of all
    least_multiplications   for a token, of a linear layer that is divided: a smaller one is sooner done than exchanged
    """

    number: int
    count: int
    owners: Mapping[str, Sequence[int]] = field(default_factory=dict)
    least_multiplications: int = 2**16


@dataclass(frozen=True)
class Heads:
    """The heads that a rank attends with, the KV heads that they read, and whether it stores their keys and values."""

    queries: range
    kv: range
    writes: bool


@dataclass(frozen=True)
class Part:
    """What a rank makes of an operation.

    bounds        [ranks + 1]: rank r makes columns bounds[r] to bounds[r + 1] of the output
    tiles         of linear and recurrent layers: the tiles that it makes
    heads         of attention
    shares_keys   other ranks read the keys that one has stored
    owners        of experts: the rank of each; None: each rank has columns of all
    """

    bounds: tuple[int, ...]
    tiles: range = range(0)
    heads: Heads | None = None
    shares_keys: bool = False
    owners: tuple[int, ...] | None = None


def part_of(operation: Operation, matrices: Matrices, rank: Rank) -> Part | None:
    """Return what the rank makes of an operation; None where every rank makes all."""
    number, count = rank.number, rank.count
    written = operation.span_written(matrices)
    match operation:
        case Linear():
            matrix = matrices[operation.matrix]
            if matrix.n * matrix.k < rank.least_multiplications and written.buffer != LOGITS:
                return None
            return Part(tile_bounds(written.columns, LANES, count), _tiles_of(written.columns, LANES, rank))
        case Experts():
            owners = rank.owners.get(operation.node)
            return Part(tile_bounds(written.columns, LANES, count), owners=None if owners is None else tuple(owners))
        case Attend():
            heads = [heads_of(operation, each, count) for each in range(count)]
            shares = len(heads) > 1 and heads[0].kv == heads[1].kv and bool(heads[1].queries)
            starts = [one.queries.start * operation.output_dim for one in heads]
            return Part((*starts, written.columns), heads=heads[number], shares_keys=shares)
        case Convolve():
            bounds = tile_bounds(written.columns, CHANNEL_TILE, count)
            return Part(bounds, _tiles_of(written.columns, CHANNEL_TILE, rank))
        case ApplyDeltaRule():
            return _by_heads(operation.num_value_heads, operation.value_dim, rank)
        case Scan():
            return _by_heads(operation.num_heads, operation.head_dim, rank)
    if written.buffer != LOGITS:
        return None
    return Part((0, *(written.columns for _ in range(count))))


def _by_heads(heads: int, columns: int, rank: Rank) -> Part:
    bounds, tiles = tile_bounds(heads, 1, rank.count), ceil_div(columns, STATE_TILE)
    own = range(bounds[rank.number] * tiles, bounds[rank.number + 1] * tiles)
    return Part(tuple(head * columns for head in bounds), own)


def tile_bounds(columns: int, tile: int, count: int) -> tuple[int, ...]:
    """Return the bounds [count + 1] of whole tiles of columns that are divided evenly; divide_columns() in C."""
    tiles = ceil_div(columns, tile)
    return tuple(min(columns, tiles * number // count * tile) for number in range(count + 1))


def _tiles_of(columns: int, tile: int, rank: Rank) -> range:
    """The tiles between the rank's bounds."""
    tiles = ceil_div(columns, tile)
    return range(tiles * rank.number // rank.count, tiles * (rank.number + 1) // rank.count)


def heads_of(attend: Attend, number: int, count: int) -> Heads:
    """Return the heads of rank `number` of `count`: KV heads, or some queries of one that several ranks read."""
    num_kv, group = attend.num_kv_heads, attend.num_heads // attend.num_kv_heads
    if count <= num_kv:
        first, last = (num_kv * each // count for each in (number, number + 1))
        return Heads(range(first * group, last * group), range(first, last), writes=True)
    sharing = min(count // num_kv, group)
    kv, place = divmod(number, sharing)
    if kv >= num_kv:
        return Heads(range(attend.num_heads, attend.num_heads), range(num_kv - 1, num_kv), writes=False)
    begin, end = (kv * group + group * each // sharing for each in (place, place + 1))
    return Heads(range(begin, end), range(kv, kv + 1), writes=place == 0)


def slot_floats(program: CpuProgram, count: int, tokens: int) -> int:
    """Return the floats of the largest exchange of a step of so many tokens among `count` ranks."""
    most = 0
    for operation in program.operations:
        part = part_of(operation, program.matrices, Rank(0, count, least_multiplications=0))
        if part is None or operation.span_written(program.matrices).buffer == LOGITS:
            continue
        columns, rows = part.bounds[-1], tokens
        if isinstance(operation, Experts):
            columns, rows = max(columns, program.matrices[operation.down_matrix].k), tokens * operation.chosen
        most = max(most, rows * columns)
    return most


def memory_bytes(program: CpuProgram, count: int, tokens: int) -> int:
    """Return the bytes of a group's shared memory: a line for each rank, and two slots."""
    return count * LINE_BYTES + 2 * slot_floats(program, count, tokens) * _FLOAT_BYTES


def own_ranges(program: CpuProgram, rank: Rank) -> dict[str, list[tuple[int, int]]]:
    """Return the bytes of each matrix that the rank reads: first byte and number of each range."""
    found: dict[str, list[tuple[int, int]]] = {}
    for operation in program.operations:
        for name, tiles in _own_tiles(operation, program.matrices, rank):
            size = program.matrices[name].tile_bytes
            found.setdefault(name, []).append((tiles.start * size, len(tiles) * size))
    return found


def _own_tiles(operation: Operation, matrices: Matrices, rank: Rank) -> Iterable[tuple[str, range]]:
    """Names of matrices, and the tiles of each that the rank reads for an operation."""
    part = part_of(operation, matrices, rank)
    match operation:
        case Embed():
            return [(operation.table, range(matrices[operation.table].num_tiles))]
        case Linear():
            tiles = range(matrices[operation.matrix].num_tiles)
            return [(operation.matrix, tiles if part is None else _stored(part.tiles, operation.matrix, matrices))]
        case Experts() if part is not None and part.owners is not None:
            owned = zip(operation.up, operation.down, part.owners, strict=True)
            names = [one.matrix for up, down, owner in owned if owner == rank.number for one in (up, down)]
            return [(name, range(matrices[name].num_tiles)) for name in names]
        case Experts():
            divided = []
            for layer in operation.layers:
                matrix = matrices[layer.matrix]
                columns = matrix.n // 2 if matrix.pairs else matrix.n
                divided.append((layer.matrix, _stored(_tiles_of(columns, LANES, rank), layer.matrix, matrices)))
            return divided
    return []


def _stored(tiles: range, name: str, matrices: Matrices) -> range:
    """The tiles as they are stored: those of a matrix of pairs take turns."""
    return range(2 * tiles.start, 2 * tiles.stop) if matrices[name].pairs else tiles
