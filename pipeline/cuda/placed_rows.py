"""Where the values of the graph lie while a program is lowered: views of buffers, parts of sums, codes with scales."""

from dataclasses import dataclass, replace

from ingot.artifact.launch_program import ELEMENT_BYTES, BufferArgument

ALIGNED_BYTES = 16  # what Triton is told that every pointer is a multiple of


@dataclass(frozen=True)
class Rows:
    """A value [rows, columns]: a buffer that begins at its first element, a row every `stride` elements.

    parts    of a sum, `part_stride` elements apart, that whoever reads the rows adds in order
    """

    buffer: BufferArgument
    columns: int
    stride: int
    parts: int = 1
    part_stride: int = 0

    @property
    def is_aligned(self) -> bool:
        """Whether a kernel may be given a pointer to the first element."""
        return self.buffer.offset * ELEMENT_BYTES[self.buffer.type] % ALIGNED_BYTES == 0

    def slice(self, start: int, columns: int) -> "Rows":
        """Some of the columns, where they are."""
        buffer = self.buffer.model_copy(update={"offset": self.buffer.offset + start})
        return replace(self, buffer=buffer, columns=columns)

    @property
    def unaligned(self) -> tuple[BufferArgument, int]:
        """The whole buffer, and how many elements into it the rows begin: for kernels that take that as a number."""
        return self.buffer.model_copy(update={"offset": 0}), self.buffer.offset


@dataclass(frozen=True)
class QuantizedRows:
    """Rows of 8-bit codes and a scale of each: kind 1 e4m3fn, 2 int8 (kernels/kv_precision.py)."""

    codes: BufferArgument
    scales: BufferArgument
    columns: int
    kind: int
