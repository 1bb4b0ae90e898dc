"""Buffers for the values between a program's steps: made once, shared by values whose lifetimes do not overlap."""

import numpy as np
from numpy.typing import NDArray

from ingot.artifact import Program, ValueFacts
from ingot.artifact.program_checks import inputs_of, outputs_of
from ingot.errors import EngineError
from ingot.runtime.cpu.kv_pool import physical_bytes
from ingot.sizes import format_bytes

SegmentBuffer = NDArray[np.float32] | NDArray[np.float16] | NDArray[np.int64]

_FIRST_LOGITS_ROWS = 64


class ValueBuffers:
    """One array per value, [rows, columns] or [rows], 64-byte aligned and zeroed.

    Token values have `token_rows` rows. Values with a row per wanted logit start small and grow on demand.
    Raises EngineError for buffers larger than the machine's memory.
    """

    def __init__(self, program: Program, token_rows: int) -> None:
        self._values = program.values
        self._slot_of = plan_slots(program)
        self.token_rows = token_rows
        self.logits_rows = min(token_rows, _FIRST_LOGITS_ROWS)
        self._slots: dict[int, SegmentBuffer] = {}
        self._refuse_more_than_memory()
        self._fill_slots("tokens", token_rows)
        self._fill_slots("logits", self.logits_rows)

    def __getitem__(self, name: str) -> SegmentBuffer:
        return self._slots[self._slot_of[name]]

    def floats(self, name: str) -> NDArray[np.float32]:
        """The buffer of a float32 value."""
        buffer = self[name]
        assert buffer.dtype == np.float32
        return buffer  # type: ignore[return-value]  # asserted above

    def integers(self, name: str) -> NDArray[np.int64]:
        """The buffer of an int64 value."""
        buffer = self[name]
        assert buffer.dtype == np.int64
        return buffer  # type: ignore[return-value]  # asserted above

    def grow_logits(self, rows: int) -> bool:
        """Make room for `rows` rows of logits; True when buffers moved and bindings to them are invalid."""
        if rows <= self.logits_rows:
            return False
        self.logits_rows = min(self.token_rows, max(rows, 2 * self.logits_rows))
        self._fill_slots("logits", self.logits_rows)
        return True

    @property
    def num_bytes(self) -> int:
        """Bytes of address space of all buffers."""
        return sum(buffer.nbytes for buffer in self._slots.values())

    def _refuse_more_than_memory(self) -> None:
        facts = {slot: self._values[name] for name, slot in self._slot_of.items()}
        widths = (max(1, one.columns) * np.dtype(one.dtype).itemsize for one in facts.values())
        needed = self.token_rows * sum(widths)
        if needed > physical_bytes():
            raise EngineError(
                f"the values between the program's steps take {format_bytes(needed)} for {self.token_rows} tokens, and "
                f"this machine has {format_bytes(physical_bytes())}; set a smaller max_batch_tokens"
            )

    def _fill_slots(self, rows_kind: str, rows: int) -> None:
        for name, slot in self._slot_of.items():
            facts = self._values[name]
            if facts.rows == rows_kind:
                self._slots[slot] = _aligned_zeros((rows, facts.columns) if facts.columns else (rows,), facts.dtype)


def plan_slots(program: Program) -> dict[str, int]:
    """Assign a slot to every value. Two values of equal shape share a slot when their lifetimes do not overlap.

    A step's outputs never share a slot with its inputs, nor with values that later steps read.
    """
    last_use = {name: index for index, step in enumerate(program.steps) for name in inputs_of(step)}
    slots: dict[str, int] = {}
    free: dict[ValueFacts, list[int]] = {}
    made = {name for step in program.steps for name in outputs_of(step)}
    for name in [name for name in program.values if name not in made]:  # the program's inputs have slots of their own
        slots[name] = len(slots)
    count = len(slots)
    for index, step in enumerate(program.steps):
        for name in outputs_of(step):
            spare = free.get(program.values[name], [])
            slots[name] = spare.pop() if spare else count
            count = max(count, slots[name] + 1)
        for name in inputs_of(step):
            if last_use[name] == index and name in made:
                free.setdefault(program.values[name], []).append(slots[name])
    return slots


def _aligned_zeros(shape: tuple[int, ...], dtype: str) -> SegmentBuffer:
    """Make zeros at a 64-byte boundary; pages that are never written use no memory."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    try:
        raw = np.zeros(size + 64, np.uint8)
    except MemoryError as error:
        raise EngineError(
            f"a buffer of {format_bytes(size)} cannot be allocated; set a smaller max_batch_tokens, or free memory"
        ) from error
    offset = -raw.ctypes.data % 64
    buffer: SegmentBuffer = raw[offset : offset + size].view(dtype).reshape(shape)
    return buffer
