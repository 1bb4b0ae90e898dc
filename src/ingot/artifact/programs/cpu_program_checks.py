"""Checks of a CPU launch program against its artifact: what an operation reads and writes exists, and fits there.

The engine's C code checks nothing of this: a program that passes here stays within the arena, its weights and the KV
pool, whatever its maker meant. Each problem names the operation and the thing that is wrong.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ingot.artifact.programs.cpu_program import (
    NUMBERS,
    OPERATIONS_FILE,
    WEIGHTS_FILE,
    Attend,
    Buffer,
    Combine,
    CpuProgram,
    Embed,
    ExpertLayer,
    Experts,
    Linear,
    Operation,
    Recurrent,
    Rotate,
    read_cpu_program,
)
from ingot.artifact.programs.draft_head import (
    DRAFT_HEAD_FILE,
    HIDDEN,
    HIDDEN_STATES,
    DraftHead,
    read_draft_head,
)
from ingot.artifact.programs.operation_row import LANES, Matrix, Span, Table
from ingot.artifact.programs.recurrent import kind_of, problem_of_sizes, problem_of_state, problem_of_unused
from ingot.artifact.reader import Artifact
from ingot.artifact.safetensors import StoredTensor, read_header
from ingot.errors import ArtifactError, did_you_mean, shown
from ingot.sizes import round_up

LOGITS = "logits"
MOST_ARENA_FLOATS = 2**32
_MOST_SIZE = 2**31 - 1
_MOST_COLUMNS = 2**24  # columns of a buffer
_MOST_SUMMED = 2**16  # integer codes whose sum is exact in 32 bits
MOST_GROUPS = 256  # groups of experts
_STEP = 16  # columns: blocks are multiples of it


def read_operations(artifact: Artifact) -> CpuProgram:
    """Read and check the artifact's operations. ArtifactError if it has none, or for the first thing that is wrong."""
    program = read_whole_program(artifact)
    check_weights(artifact, program)
    return program


def read_whole_program(artifact: Artifact) -> CpuProgram:
    """Read and check the operations without their weights, of which a GPU may have some in a form of its own."""
    if not artifact.has(OPERATIONS_FILE):
        raise ArtifactError(f"{artifact.path}: is run by {artifact.manifest.engine}, and has no program of operations")
    file = artifact.file(OPERATIONS_FILE)
    program = read_cpu_program(file)
    _check(artifact, file, program, program.kv == artifact.manifest.kv)
    return program


def read_draft_programs(artifact: Artifact) -> DraftHead:
    """Read and check the artifact's draft head. ArtifactError for the first thing that is wrong."""
    file = artifact.file(DRAFT_HEAD_FILE)
    found, rows = read_draft_head(file), {"model": "tokens", "head": "logits"}
    for name, program in (("model", found.model), ("head", found.head)):
        is_head = program is found.head
        for buffer, kind in {HIDDEN: rows[name], **({HIDDEN_STATES: "tokens"} if is_head else {})}.items():
            made = program.buffers.get(buffer)
            if made is None or (made.rows, made.columns) != (kind, found.hidden_size):
                raise ArtifactError(
                    f"{file}: the {name} has no buffer {shown(buffer)} with {found.hidden_size} columns and rows of"
                    f" {kind}; build the artifact again"
                )
        if is_head and program.kv.state_bytes:
            raise ArtifactError(f"{file}: the head keeps side state, which drafts cannot; build the artifact again")
        _check(artifact, file, program, is_head or program.kv == artifact.manifest.kv, (HIDDEN_STATES,) * is_head)
        check_weights(artifact, program)
    return found


def _check(
    artifact: Artifact, file: Path, program: CpuProgram, has_geometry: bool, given: tuple[str, ...] = ()
) -> None:
    """Raise ArtifactError for the first thing that is wrong; `given` buffers hold values before the first operation."""
    problem = (
        next(_problems(artifact, program, given), None) if has_geometry else "its KV geometry is not the manifest's"
    )
    if problem is not None:
        raise ArtifactError(f"{file}: {problem}; build the artifact again")


def check_weights(artifact: Artifact, program: CpuProgram) -> None:
    """Raise ArtifactError for the first weight of a program that the artifact lacks, or has in another shape."""
    weights = artifact.file(WEIGHTS_FILE)
    tensors = read_header(weights, ArtifactError, "build the artifact again")
    problem = next(_problems_of_tensors(program, tensors), None)
    if problem is not None:
        raise ArtifactError(f"{weights}: {problem}; build the artifact again")


def _problems(artifact: Artifact, program: CpuProgram, given: tuple[str, ...]) -> Iterator[str]:
    manifest = artifact.manifest
    for name in ("context_tokens", "vocab_size"):
        own, models = getattr(program, name), getattr(manifest.model, name)
        if own != models:
            yield f"it was lowered for {name} {own}, and the model has {models}"
    if program.arena_floats > MOST_ARENA_FLOATS:
        yield f"arena_floats is {program.arena_floats}; it must be at most {MOST_ARENA_FLOATS}"
    for name, buffer in program.buffers.items():
        yield from (f"the buffer {shown(name)} {problem}" for problem in _problems_of_buffer(program, name, buffer))
    for name, matrix in program.matrices.items():
        yield from (f"the matrix {shown(name)} {problem}" for problem in _problems_of_matrix(matrix))
    yield from _problems_of_operations(program, given)
    yield from _problems_of_projections(program)
    layers = [operation for operation in program.operations if isinstance(operation, Recurrent)]
    unused = problem_of_unused(layers, program.kv.state, program.kv.state_bytes)
    if unused:
        yield unused


def _problems_of_projections(program: CpuProgram) -> Iterator[str]:
    layers = {operation.node: operation for operation in program.operations if isinstance(operation, Linear)}
    for projection in program.projections:
        layer = layers.get(projection.node)
        if layer is None:
            yield f"the projection {shown(projection.module)} is of {shown(projection.node)}, not a linear layer"
            continue
        matrix, end = program.matrices[layer.matrix], projection.first_row + projection.rows
        if end > matrix.n or projection.columns != matrix.k:
            yield (
                f"the projection {shown(projection.module)} has {projection.columns} columns and ends at row {end} of"
                f" {shown(projection.node)}, which is [{matrix.n}, {matrix.k}]"
            )


def _problems_of_buffer(program: CpuProgram, name: str, buffer: Buffer) -> Iterator[str]:
    if buffer.columns > _MOST_COLUMNS:
        yield f"has {buffer.columns} columns; there may be up to {_MOST_COLUMNS}"
    if name == LOGITS:
        if (buffer.rows, buffer.columns, buffer.offset) != ("logits", program.vocab_size, -1):
            yield f"is not rows of {program.vocab_size} logits outside of the arena"
        return
    end = buffer.offset + row_floats(buffer)
    if buffer.offset < 0 or buffer.offset % LANES:
        yield f"has the offset {buffer.offset}; it must be a multiple of {LANES} from 0"
    elif end > program.arena_floats:
        yield f"ends at {end} of {program.arena_floats} floats of a token"


def _problems_of_matrix(matrix: Matrix) -> Iterator[str]:
    if max(matrix.n, matrix.k) > _MOST_SIZE - 2**16:
        yield f"is [{matrix.n}, {matrix.k}]; its sizes must be below 2^31"
    elif matrix.pairs and matrix.n % 2:
        yield f"has {matrix.n} rows in pairs"
    elif matrix.is_integer:
        if not _STEP <= matrix.block <= _MOST_SUMMED or matrix.block % _STEP:
            yield f"has blocks of {matrix.block}; they must be multiples of {_STEP} up to {_MOST_SUMMED}"
        elif not matrix.scale_bytes:
            yield "has integer codes without scales"
        elif matrix.per_row and matrix.padded_k > _MOST_SUMMED:
            yield f"has {matrix.k} columns with one scale per row; there may be up to {_MOST_SUMMED}"
    elif matrix.has_zeros or matrix.block:
        yield f"has {matrix.form} elements with zero points or blocks"
    elif (matrix.scale_bytes, matrix.per_row) != ((4, True) if matrix.form == "float8" else (0, False)):
        yield f"has {matrix.form} elements with {matrix.scale_bytes} bytes of scales"


@dataclass
class MadeColumns:
    """Columns of each buffer that hold a value: written, and not overwritten by a buffer in the same place since."""

    program: CpuProgram
    columns: dict[str, bytearray] = field(default_factory=dict)

    def has(self, span: Span) -> bool:
        """Return whether all columns of the span hold a value."""
        made = self.columns.get(span.buffer, b"")
        return bool(made) and all(made[span.column : span.column + span.columns])

    def write(self, span: Span) -> None:
        """Record that the span is written."""
        buffer = self.program.buffers[span.buffer]
        for name in [name for name in self.columns if name != span.buffer and self._shares(name, buffer)]:
            del self.columns[name]
        made = self.columns.setdefault(span.buffer, bytearray(buffer.columns))
        made[span.column : span.column + span.columns] = b"\1" * span.columns

    def copy(self, name: str, other: "MadeColumns") -> None:
        """Take a buffer with the columns that it holds elsewhere."""
        columns = bytearray(other.columns.get(name, bytes(self.program.buffers[name].columns)))
        self.write(Span(name, 0, len(columns)))
        self.columns[name] = columns

    def _shares(self, name: str, buffer: Buffer) -> bool:
        other = self.program.buffers[name]
        if min(other.offset, buffer.offset) < 0:
            return False
        is_apart = other.offset + row_floats(other) <= buffer.offset
        return not is_apart and buffer.offset + row_floats(buffer) > other.offset


def _problems_of_operations(program: CpuProgram, given: tuple[str, ...]) -> Iterator[str]:
    made, layers, states = MadeColumns(program), set[int](), set[tuple[int, str]]()
    for name in given:
        made.write(Span(name, 0, program.buffers[name].columns))
    for number, operation in enumerate(program.operations):
        place = f"operation {number} ({operation.node[:80]})"
        for problem in _problems_of_operation(program, operation, made):
            yield f"{place}: {problem}"
        if isinstance(operation, Recurrent):
            own = operation.layer, kind_of(operation)
            if own in states:
                yield f"{place}: the {own[1]} of layer {own[0]} is computed a second time"
            states.add(own)
        if isinstance(operation, Recurrent | Attend) and number >= program.head_start:
            what = "attends" if isinstance(operation, Attend) else "changes side state"
            yield f"{place}: {what} after head_start, {program.head_start}"
        if isinstance(operation, Attend):
            if operation.layer in layers:
                yield f"{place}: attention of layer {operation.layer} is computed a second time"
            layers.add(operation.layer)
    if program.head_start > len(program.operations):
        yield f"head_start is {program.head_start}, and it has {len(program.operations)} operations"
    if LOGITS not in program.buffers or not made.has(Span(LOGITS, 0, program.vocab_size)):
        yield "no operation makes the logits"
    if HIDDEN in program.buffers and not made.has(Span(HIDDEN, 0, program.buffers[HIDDEN].columns)):
        yield "hidden states are overwritten, or not made"


def _problems_of_operation(program: CpuProgram, operation: Operation, made: MadeColumns) -> Iterator[str]:
    for name in operation.matrix_names():
        if name not in program.matrices:
            near = did_you_mean(name, program.matrices)
            yield f"reads the matrix {shown(name)}, which the program does not have.{near}"
            return
    for view in operation.views:
        if view.buffer not in program.buffers:
            yield f"has no buffer {shown(view.buffer)}.{did_you_mean(view.buffer, program.buffers)}"
            return
    read, written = list(operation.spans_read(program.matrices)), operation.span_written(program.matrices)
    for span in (*read, written):
        columns = program.buffers[span.buffer].columns
        if span.column + span.columns > columns:
            end = span.column + span.columns
            yield f"uses columns {span.column} to {end} of {shown(span.buffer)}, which has {columns}"
            return
    for span in read:
        if not made.has(span):
            yield f"reads {shown(span.buffer)}, which no operation before it makes"
        if span.overlaps(written) and not (operation.may_overwrite and span == written):
            yield f"writes columns of {shown(span.buffer)} that it reads"
    yield from _problems_of_rows(program, operation)
    yield from _problems_of_facts(program, operation)
    made.write(written)


def _problems_of_rows(program: CpuProgram, operation: Operation) -> Iterator[str]:
    """Rows of tokens and of logits: the output has the operation's, and those of logits gather inputs of tokens."""
    wanted = operation.computed_rows
    inputs = {view.buffer for view in operation.views} - {operation.output.buffer}
    if program.buffers[operation.output.buffer].rows != wanted:
        yield f"writes rows of {wanted} to {shown(operation.output.buffer)}"
    for name in inputs:
        if wanted == "tokens" and program.buffers[name].rows != wanted:
            yield f"reads rows of tokens from {shown(name)}"


def _problems_of_facts(program: CpuProgram, operation: Operation) -> Iterator[str]:
    match operation:
        case Embed():
            rows, least = program.matrices[operation.table].n, program.vocab_size
            if operation.ids == "position_ids":
                least = program.context_tokens
            if rows < least:
                yield f"reads rows up to {least - 1} of {shown(operation.table)}, which has {rows}"
        case Linear():
            matrix = program.matrices[operation.matrix]
            if (operation.store == "gate") != matrix.pairs:
                yield f"stores {operation.store!r} of a matrix {'of pairs' if matrix.pairs else 'without pairs'}"
            yield from _problems_of_rounding(matrix, operation)
            yield from _problems_of_activation(operation, operation.store == "gate")
        case Experts():
            yield from _problems_of_experts(program, operation)
        case Combine():
            yield from _problems_of_activation(operation, operation.function == "gate")
            if operation.vector is not None and (operation.b is not None or operation.broadcast):
                yield f"combines with the tensor {shown(operation.vector)} and with another operand"
        case Rotate():
            if operation.rotary_dim > operation.head_dim:
                yield f"rotates {operation.rotary_dim} of {operation.head_dim} dimensions"
        case Attend():
            yield from _problems_of_attention(program, operation)
        case _ if isinstance(operation, Recurrent):
            problem = problem_of_sizes(operation) or problem_of_state(operation, program.kv.state)
            if problem:
                yield problem


def _problems_of_experts(program: CpuProgram, operation: Experts) -> Iterator[str]:
    count, matrices = len(operation.up), program.matrices
    if len(operation.down) != count or operation.chosen > count:
        yield f"chooses {operation.chosen} of {count} and {len(operation.down)} experts"
        return
    groups, chosen_groups = operation.groups, operation.chosen_groups
    per_group = count // groups
    if count % groups or groups > MOST_GROUPS or chosen_groups > groups or chosen_groups * per_group < operation.chosen:
        yield f"chooses {operation.chosen} experts from {chosen_groups} of {groups} groups of {count}"
    gated = matrices[operation.up[0].matrix].pairs
    for layers, are_pairs in ((operation.up, gated), (operation.down, False)):
        first = matrices[layers[0].matrix]
        for layer in layers:
            matrix = matrices[layer.matrix]
            if (matrix.n, matrix.k, matrix.pairs) != (first.n, first.k, are_pairs):
                yield f"has experts of different sizes, or pairs in the wrong place: {shown(layer.matrix)}"
            yield from _problems_of_rounding(matrix, layer)
            yield from _problems_of_activation(layer, are_pairs)
    if matrices[operation.up[0].matrix].n != (1 + gated) * matrices[operation.down[0].matrix].k:
        yield "has experts whose down projection reads another number of columns than their up projection makes"


def _problems_of_rounding(matrix: Matrix, operation: Linear | ExpertLayer) -> Iterator[str]:
    if (operation.rounding == "none") == matrix.is_integer:
        yield f"multiplies activations rounded by {operation.rounding!r} by {matrix.form} weights"
    if (operation.rounding == "static") != bool(operation.static_scale and operation.static_scale > 0):
        yield f"rounds by {operation.rounding!r} with the static scale {operation.static_scale}"


def _problems_of_activation(operation: Linear | ExpertLayer | Combine, is_gate: bool) -> Iterator[str]:
    names = NUMBERS.get(operation.activation, ())
    if len(operation.numbers) != len(names):
        yield f"has {len(operation.numbers)} numbers of the activation {operation.activation!r}, which has {len(names)}"
    if operation.activation == "clamped-swiglu" and not is_gate:
        yield "has the activation 'clamped-swiglu' without an up projection"


def _problems_of_attention(program: CpuProgram, operation: Attend) -> Iterator[str]:
    if operation.layer >= program.kv.num_layers:
        yield f"attends in layer {operation.layer}; the KV pool has {program.kv.num_layers}"
        return
    layer = program.kv.layers[operation.layer]
    is_latent = layer.value_dim == 0  # values are a part of the keys
    sizes = (operation.num_kv_heads, operation.head_dim, 0 if is_latent else operation.output_dim)
    if sizes != (layer.num_kv_heads, layer.key_dim, layer.value_dim) or operation.num_heads % operation.num_kv_heads:
        yield (
            f"has {operation.num_heads} heads over {sizes[0]} of {sizes[1]} dimensions; the KV pool has "
            f"{layer.num_kv_heads} with keys of {layer.key_dim} and values of {layer.value_dim}"
        )
    if operation.window != layer.window:
        yield f"has a window of {operation.window} tokens; the KV geometry has {layer.window}"
    if is_latent and not 1 <= operation.value_dim <= operation.head_dim:
        yield f"has values of {operation.value_dim} dimensions, which are a part of keys of {operation.head_dim}"
    has_own = operation.key is not None and (is_latent or operation.value is not None)
    if has_own != (layer.source == operation.layer) or (operation.value is None) != (is_latent or not has_own):
        given = "a key and value" if has_own else "not both a key and a value"
        yield f"has {given}; the KV pool has those of layer {layer.source} for it"
    tables = (operation.cos is None, operation.sin is None, operation.rotary_dim == 0)
    if len(set(tables)) > 1 or operation.rotary_dim % 2 or operation.rotary_dim > operation.head_dim:
        yield f"rotates {operation.rotary_dim} of {operation.head_dim} dimensions, or lacks a table"


def _problems_of_tensors(program: CpuProgram, tensors: dict[str, StoredTensor]) -> Iterator[str]:
    for name, matrix in program.matrices.items():
        yield from _problems_of_tensor(tensors, name, "U8", (matrix.num_tiles, matrix.tile_bytes))
    for operation in program.operations:
        for name, row, role in operation.tensors():
            shape = row.shape(role, program.matrices)
            if isinstance(role, Table):
                stored = tensors[name].shape if name in tensors else ()
                shape = (max(program.context_tokens, stored[0] if stored else 0), *shape)
            yield from _problems_of_tensor(tensors, name, "F32", shape)


def _problems_of_tensor(
    tensors: dict[str, StoredTensor], name: str, dtype: str, shape: tuple[int, ...]
) -> Iterator[str]:
    stored = tensors.get(name)
    if stored is None:
        yield f"holds no tensor {shown(name)}.{did_you_mean(name, tensors)}"
    elif (stored.dtype, stored.shape) != (dtype, shape):
        yield f"{shown(name)} is {stored.dtype} {list(stored.shape)}; the program needs {dtype} {list(shape)}"


def row_floats(buffer: Buffer) -> int:
    """Return the floats from one row of a buffer to the next."""
    return round_up(buffer.columns, LANES)
