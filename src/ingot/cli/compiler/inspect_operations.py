"""Tables of a CPU launch program, for `ingot inspect --program`."""

from collections.abc import Iterator

from ingot.artifact.programs.cpu_program import CpuProgram, Operation
from ingot.artifact.programs.operation_row import Matrix, View
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
    yield from operation.facts(program.matrices)
    if operation.computed_rows == "logits":
        yield "rows of logits"


def _flow(operation: Operation) -> str:
    *reads, written = map(_place, operation.views)
    return f"{', '.join(reads)} -> {written}".strip()


def _place(view: View) -> str:
    return view.buffer + (f"[{view.column}:]" if view.column else "")


def _forms(program: CpuProgram) -> list[tuple[str, str, str, str]]:
    """Rows (form, matrices, elements, bytes)."""
    groups: dict[str, list[Matrix]] = {}
    for matrix in program.matrices.values():
        groups.setdefault(str(matrix), []).append(matrix)
    return [
        (
            form,
            str(len(found)),
            f"{sum(matrix.n * matrix.k for matrix in found):,}",
            format_bytes(sum(matrix.num_bytes for matrix in found)),
        )
        for form, found in sorted(groups.items())
    ]
