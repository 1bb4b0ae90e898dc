"""The columns of buffers that the operations of a CPU launch program read and write."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ingot.artifact.cpu_program import (
    ApplyDeltaRule,
    Attend,
    Combine,
    Convolve,
    Embed,
    Experts,
    Linear,
    Matrix,
    Normalize,
    Operation,
    Rotate,
    Scan,
    View,
)


@dataclass(frozen=True)
class Span:
    """`columns` columns of a buffer from `column` on."""

    buffer: str
    column: int
    columns: int

    @classmethod
    def of(cls, view: View, columns: int) -> "Span":
        """The columns of a view."""
        return cls(view.buffer, view.column, columns)

    def overlaps(self, other: "Span") -> bool:
        """Whether both have a column in common."""
        is_apart = self.column + self.columns <= other.column or other.column + other.columns <= self.column
        return self.buffer == other.buffer and not is_apart


def spans_read(operation: Operation, matrices: Mapping[str, Matrix]) -> Iterator[Span]:
    """Return the spans that an operation reads, its output included where it adds to it."""
    match operation:
        case Embed(adds=True):
            yield span_written(operation, matrices)
        case Linear():
            yield Span.of(operation.input, matrices[operation.matrix].k)
            if operation.store == "add":
                yield span_written(operation, matrices)
        case Normalize():
            for view in (operation.input, operation.residual):
                if view is not None:
                    yield Span.of(view, operation.columns * operation.groups)
        case Combine():
            yield Span.of(operation.a, operation.columns)
            if isinstance(operation.b, View):
                yield Span.of(operation.b, 1 if operation.broadcast else operation.columns)
        case Experts():
            yield Span.of(operation.logits, len(operation.up))
            yield Span.of(operation.input, matrices[operation.up[0].matrix].k)
            if operation.adds:
                yield span_written(operation, matrices)
        case Rotate():
            yield Span.of(operation.input, operation.heads * operation.head_dim)
        case Attend():
            yield Span.of(operation.query, operation.num_heads * operation.head_dim)
            for view, dim in ((operation.key, operation.head_dim), (operation.value, operation.output_dim)):
                if view is not None:
                    yield Span.of(view, operation.num_kv_heads * dim)
        case Convolve() | ApplyDeltaRule() | Scan():
            for name, columns in operation.widths.items():
                if name != "output":
                    yield Span.of(getattr(operation, name), columns)


def span_written(operation: Operation, matrices: Mapping[str, Matrix]) -> Span:
    """Return the span that an operation writes."""
    match operation:
        case Embed():
            return Span.of(operation.output, matrices[operation.table].k)
        case Linear():
            n = matrices[operation.matrix].n
            return Span.of(operation.output, n // 2 if operation.store == "gate" else n)
        case Normalize():
            return Span.of(operation.output, operation.columns * operation.groups)
        case Combine():
            return Span.of(operation.output, operation.columns)
        case Experts():
            return Span.of(operation.output, matrices[operation.down[0].matrix].n)
        case Rotate():
            return Span.of(operation.output, operation.heads * operation.head_dim)
        case Attend():
            return Span.of(operation.output, operation.num_heads * operation.output_dim)
        case Convolve() | ApplyDeltaRule() | Scan():
            return Span.of(operation.output, operation.widths["output"])
