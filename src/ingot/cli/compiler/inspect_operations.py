"""Tables of a CPU launch program, for `ingot inspect --program`."""

from collections.abc import Iterator

from ingot.artifact.programs.cpu_program import (
    Attend,
    Combine,
    CpuProgram,
    Embed,
    Experts,
    Linear,
    Matrix,
    Normalize,
    Operation,
    Rotate,
    View,
)
from ingot.cli.terminal.tables import print_table
from ingot.sizes import format_bytes


def print_operations(program: CpuProgram) -> None:
    """Print the operations in order, then the matrices by form."""
    title = f"CPU launch program, {format_bytes(4 * program.arena_floats)} of arena for each token of a step"
    rows = [
        (str(number), operation.kind, operation.node, ", ".join(_facts(program, operation)), _flow(operation))
        for number, operation in enumerate(program.operations)
    ]
    print_table(title, ("step", "operation", "for", "how", "reads and writes"), rows, left=5)
    print_table("Matrices", ("form", "matrices", "elements", "size"), _forms(program), left=1)


def _facts(program: CpuProgram, operation: Operation) -> Iterator[str]:
    match operation:
        case Embed():
            yield _matrix_in_words(program.matrices[operation.table])
            yield "by position" if operation.ids == "position_ids" else "by token"
        case Linear():
            matrix = program.matrices[operation.matrix]
            yield f"{matrix.k} -> {matrix.n} {_matrix_in_words(matrix)}"
            yield from (f"{operation.norm.kind} norm",) if operation.norm else ()
            yield from (f"int8 by {operation.rounding}",) if operation.rounding != "none" else ()
            yield from ("bias",) if operation.bias else ()
            yield from (operation.activation,) if operation.activation != "none" else ()
            yield from (operation.store,) if operation.store != "store" else ()
            yield from (f"softcap {operation.cap:g}",) if operation.cap else ()
        case Normalize():
            yield f"{operation.norm.kind} norm of {operation.groups} x {operation.columns}"
        case Combine():
            yield operation.function
            yield from (operation.activation,) if operation.activation != "none" else ()
        case Experts():
            up, down = (program.matrices[layers[0].matrix] for layers in (operation.up, operation.down))
            yield f"{operation.chosen} of {len(operation.up)} experts by {operation.score}"
            yield f"{up.k} -> {down.k} -> {down.n} {_matrix_in_words(down)}"
            yield from (f"{operation.norm.kind} norm",) if operation.norm else ()
            yield from ("add",) if operation.adds else ()
        case Rotate():
            yield f"{operation.rotary_dim} of {operation.heads} x {operation.head_dim}"
        case Attend():
            heads = f"{operation.num_heads} x {operation.head_dim} heads over {operation.num_kv_heads}"
            yield f"layer {operation.layer}: {heads}"
            yield from (f"values of {operation.value_dim}",) if operation.value_dim else ()
            yield from (f"window {operation.window}",) if operation.window else ()
            yield from ("sinks",) if operation.sinks else ()
    if getattr(operation, "rows", "tokens") == "logits":
        yield "rows of logits"


def _matrix_in_words(matrix: Matrix) -> str:
    if not matrix.is_integer:
        return matrix.form
    of_weight = "per row" if matrix.per_row else f"in blocks of {matrix.block}"
    return f"{matrix.form} {of_weight}{' with zero points' if matrix.has_zeros else ''}"


def _flow(operation: Operation) -> str:
    views = {name: getattr(operation, name) for name in type(operation).model_fields}
    reads = [_place(view) for name, view in views.items() if isinstance(view, View) and name != "output"]
    return f"{', '.join(reads)} -> {_place(operation.output)}".strip()


def _place(view: View) -> str:
    return view.buffer + (f"[{view.column}:]" if view.column else "")


def _forms(program: CpuProgram) -> list[tuple[str, str, str, str]]:
    """Rows (form, matrices, elements, bytes)."""
    groups: dict[str, list[Matrix]] = {}
    for matrix in program.matrices.values():
        groups.setdefault(_matrix_in_words(matrix), []).append(matrix)
    return [
        (
            form,
            str(len(found)),
            f"{sum(matrix.n * matrix.k for matrix in found):,}",
            format_bytes(sum(matrix.num_bytes for matrix in found)),
        )
        for form, found in sorted(groups.items())
    ]
