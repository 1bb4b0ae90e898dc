"""Inputs of a step: padding, staging in turns, and tables of which only changes are copied."""

import numpy as np

from ingot.artifact.programs.launch_program import BufferArgument, CudaProgram, HostCopy, HostValue, LaunchProgram
from ingot.runtime.cuda.step_inputs import (
    DeviceTables,
    ExchangedValues,
    HostExchange,
    InputLayout,
    StagingRing,
    token_slots,
)
from ingot.runtime.forward_batch import FloatArray, SamplingArrays
from tests.each_case import each_case
from tests.runtime.cuda.batches import Growing, greedy, token_ids
from tests.simulators.interpreted_device import InterpretedDevice

RAGGED = LaunchProgram(
    rows=8,
    sequences=3,
    logits_rows=3,
    attention="ragged",
    tiles=5,
    arena_bytes=0,
    places={},
    launches=(),
    head_start=0,
)
DTYPES = {"i64": np.int64, "i32": np.int32, "f32": np.float32}


def filled(name: str, dtype: str, count: int, **given: object) -> list[float]:
    """An input of a step of 5 and 1 tokens of two sequences, in tiles of 2 queries."""
    layout = InputLayout.of(RAGGED)
    sequences = Growing([token_ids(9), token_ids(4, 1)], [[4, 6, 1], [3, -1, -1]])
    sequences.done = [3, 2]
    batch = sequences.step([5, 1], "last")
    staging = np.full(layout.bytes, 0xEE, np.uint8)
    draws = given.get("draws")
    assert draws is None or isinstance(draws, SamplingArrays)
    size = layout.fill(staging, batch, token_slots(batch, 4), None, draws, tile_queries=2)
    assert size == (layout.greedy_bytes if draws is None or draws.greedy else layout.bytes)
    begin = layout.offsets[name]
    found: list[float] = staging[begin : begin + count * np.dtype(DTYPES[dtype]).itemsize].view(DTYPES[dtype]).tolist()
    return found


@each_case(
    ("name", "dtype", "wanted"),
    [
        ("position_ids", "i64", [3, 4, 5, 6, 7, 2, 0, 0]),
        ("slots", "i64", [19, 24, 25, 26, 27, 14, -1, -1]),
        ("carried", "i32", [-1] * 8),
        ("logits_indices", "i64", [4, 5, -1]),
        ("lengths", "i32", [8, 3, 0]),
        ("query_starts", "i32", [0, 5, 6, 6]),
        ("tile_sequences", "i32", [0, 0, 0, 1, -1]),
        ("tile_starts", "i32", [0, 2, 4, 0, 0]),
    ],
)
def test_a_batch_is_padded_to_its_bucket(name: str, dtype: str, wanted: list[int]) -> None:
    assert filled(name, dtype, len(wanted)) == wanted


def test_sampling_parameters_are_copied_when_a_row_is_sampled() -> None:
    draws = SamplingArrays(*(np.array([0.5, 0], np.float32), np.array([7, 0], np.int32)), *[np.ones(2, np.float32)] * 2)
    assert filled("temperatures", "f32", 3, draws=draws) == [0.5, 0, 0]
    assert filled("top_ks", "i32", 3, draws=draws) == [7, 0, 0]
    assert filled("top_ps", "f32", 3, draws=draws) == [1, 1, 1]
    filled("lengths", "i32", 3, draws=greedy(2))


def test_an_area_is_reused_only_when_its_copy_is_done() -> None:
    device = InterpretedDevice()
    stream = device.make_stream()
    ring = StagingRing(device, 2, 4, "a test")
    places = [device.allocate(4, "a test") for _ in range(5)]
    for value, place in enumerate(places):
        with ring.area(stream) as area:
            area[:] = value
            device.copy_in(place, area, stream)
    device.synchronize("a test")
    assert [device.view(place, 4).tolist() for place in places] == [[value] * 4 for value in range(5)]


def test_only_the_changed_cells_of_tables_are_copied() -> None:
    device = InterpretedDevice()
    stream = device.make_stream()
    tables = DeviceTables(device, 4, 64)
    staging = device.allocate_pinned(tables.bytes, "a test")

    def sent(*rows: list[int]) -> int:
        """Cells that a step copied; the device then holds its tables."""
        before, given = device.copied_bytes, np.array(rows, np.int32)
        tables.send(given, staging, stream)
        device.synchronize("a test")
        held = device.view(tables.address).view(np.int32).reshape(4, 64)[: len(rows), : given.shape[1]]
        np.testing.assert_array_equal(held[given >= 0], given[given >= 0])
        return (device.copied_bytes - before) // 4

    assert sent([1, 2], [3, -1]) == 4
    assert sent([1, 2], [3, -1]) == 0
    assert sent([1, 2, 5], [3, -1, -1]) == 1
    assert sent([1, 2, 5], [3, 7, -1], [8, -1, -1]) == 4  # the rectangle of rows 1 and 2, columns 0 and 1
    assert sent([3, 7, -1], [8, -1, -1]) == 4  # the first sequence ended
    tables.forget()
    assert sent([3, 7, -1], [8, -1, -1]) == 4


def test_a_long_context_copies_only_the_columns_that_a_step_uses() -> None:
    device = InterpretedDevice()
    tables = DeviceTables(device, 2, 8192)
    tables.send(np.array([[1, 2, 3]], np.int32), device.allocate_pinned(tables.bytes, "a test"), device.make_stream())
    assert device.copied_bytes == 3 * 4


class Doubling:
    """A stage of the host that doubles columns 1 and 2 of a buffer of 4."""

    def __init__(self) -> None:
        self.rows = np.full((8, 4), -1, np.float32)
        self.stages: list[int] = []

    def rows_of(self, name: str) -> FloatArray:
        assert name == "x"
        return self.rows

    def run(self, stage: int) -> None:
        self.stages.append(stage)
        self.rows[:, 1:3] *= 2


@each_case(("type_", "dtype"), [("fp32", np.float32), ("fp16", np.float16), ("bf16", np.uint16)])
def test_a_stage_of_the_host_gets_the_tokens_rows_and_padding_gets_zeros(type_: str, dtype: type[np.generic]) -> None:
    rows, tokens, width = 4, 3, np.dtype(dtype).itemsize
    value = HostValue(buffer="x", column=1, columns=2, rows=BufferArgument(name="y", type=type_))
    copies = {one: HostCopy(stage=1, direction=one, values=(value,), node=one) for one in ("send", "receive")}
    launches = RAGGED.model_copy(update={"rows": rows, "launches": tuple(copies.values())})
    device, stages = InterpretedDevice(), Doubling()
    stream = device.make_stream()
    exchange = HostExchange(device, stream, CudaProgram.model_construct(programs=(launches,)))
    address = device.allocate(rows * 2 * width, "y")
    given = np.arange(1, 9, dtype=np.float32).reshape(rows, 2)
    bits = given.view(np.uint32) >> 16 if type_ == "bf16" else given
    device.view(address)[: bits.size * width] = bits.astype(dtype).reshape(-1).view(np.uint8)
    exchange.begin(stages, tokens)
    for copy in copies.values():
        exchange.queue(ExchangedValues(copy, (address,), rows))
    device.synchronize("")
    assert stages.stages == [1]
    assert stages.rows[:tokens, 1:3].tolist() == (2 * given[:tokens]).tolist()
    assert (stages.rows[tokens:, [0, 3]] == -1).all()
    back = device.view(address)[: rows * 2 * width].view(dtype).reshape(rows, 2)
    floats = (back.astype(np.uint32) << 16).view(np.float32) if type_ == "bf16" else back
    assert floats.tolist() == [*(2 * given[:tokens]).tolist(), [0, 0]]
