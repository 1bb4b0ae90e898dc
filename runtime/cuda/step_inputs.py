"""What a step brings to the device: its small inputs in one copy, and what changed in the block tables."""

from ingot.artifact.launch_program import CudaProgram
from ingot.runtime.batch import ForwardBatch, Int32Array, Int64Array, TokenDraws
from ingot.runtime.cuda.block_tables import DeviceTables
from ingot.runtime.cuda.device import Bytes, Device, Stream
from ingot.runtime.cuda.input_layout import InputLayout
from ingot.runtime.cuda.staging import StagingRing

_AREAS = 4  # steps that the host may be ahead of the device's copies
_INDEX_BYTES = 8


class StepInputs:
    """Device memory for the inputs of any bucket, and the staging that fills it."""

    def __init__(self, device: Device, stream: Stream, program: CudaProgram) -> None:
        self.layouts = [InputLayout.of(one) for one in program.programs]
        self._device, self._stream = device, stream
        self._tile_queries = program.tile_queries
        size = max(layout.bytes for layout in self.layouts)
        self._address = device.allocate(size, "a step's inputs")
        self._tables = DeviceTables(device, max(one.sequences for one in program.programs), program.table_columns)
        self._ring = StagingRing(device, _AREAS, size + self._tables.bytes, "staging of a step's inputs")

    def addresses(self, layout: InputLayout) -> dict[str, int]:
        """Where the inputs of a bucket lie, its tables among them."""
        return {"tables": self._tables.address} | {
            name: self._address + offset for name, offset in layout.offsets.items()
        }

    def clear(self) -> None:
        """Queue zeros for all inputs but the tables."""
        size = max(layout.bytes for layout in self.layouts)
        self._device.clear(self._address, size, self._stream)

    def send(
        self,
        layout: InputLayout,
        batch: ForwardBatch,
        slots: Int64Array,
        carried: Int32Array | None,
        draws: TokenDraws | None,
    ) -> None:
        """Queue the copies of a step's inputs; the batch's arrays are the caller's again."""
        with self._ring.area(self._stream) as area:
            try:
                size = layout.fill(area, batch, slots, carried, draws, self._tile_queries)
                self._device.copy_in(self._address, area[:size], self._stream)
                self._tables.send(batch.block_tables, area[layout.bytes :], self._stream)
            except BaseException:
                self._tables.forget()
                raise

    def send_indices(self, layout: InputLayout, indices: Int64Array) -> None:
        """Queue the copy of other rows of wanted logits, for the head alone."""
        with self._ring.area(self._stream) as area:
            part: Bytes = area[: layout.program.logits_rows * _INDEX_BYTES]
            layout.put_indices(part, indices)
            self._device.copy_in(self._address + layout.offsets["logits_indices"], part, self._stream)
