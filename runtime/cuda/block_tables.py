"""The sequences' block tables on the device: kept there, and changed where a step's differ.

A table has a column for every block of the longest context, of which most steps change none or a few: the cells that
differ from what the device holds span a rectangle, and that is one copy.
"""

import numpy as np

from ingot.runtime.batch import Int32Array
from ingot.runtime.cuda.device import Bytes, Device, Stream

_UNKNOWN = -2
_CELL_BYTES = 4


class DeviceTables:
    """tables [sequences, columns] i32 on the device, and what they hold."""

    def __init__(self, device: Device, sequences: int, columns: int) -> None:
        self._device = device
        self._held = np.full((sequences, columns), _UNKNOWN, np.int32)
        self.address = device.allocate(self._held.nbytes, f"block tables of {sequences} sequences")

    @property
    def bytes(self) -> int:
        """Size on the device, and the most that one step copies."""
        return self._held.nbytes

    def send(self, tables: Int32Array, staging: Bytes, stream: Stream) -> None:
        """Bring a step's tables [S, blocks] to the device; -1 stands for no block, and nobody reads what is there."""
        held = self._held[: tables.shape[0], : tables.shape[1]]
        changed = (tables != held) & (tables >= 0)
        rows, columns = changed.any(axis=1).nonzero()[0], changed.any(axis=0).nonzero()[0]
        if not len(rows):
            return
        top, bottom, left, right = rows[0], rows[-1] + 1, columns[0], columns[-1] + 1
        part = held[top:bottom, left:right]
        np.copyto(part, tables[top:bottom, left:right], where=tables[top:bottom, left:right] >= 0)
        copied = staging[: part.size * _CELL_BYTES].reshape(part.shape[0], -1)
        copied.view(np.int32)[...] = part
        pitch = self._held.shape[1] * _CELL_BYTES
        self._device.copy_rows_in(self.address + int(top) * pitch + int(left) * _CELL_BYTES, pitch, copied, stream)

    def forget(self) -> None:
        """After a failure: what the device holds is not known."""
        self._held.fill(_UNKNOWN)
