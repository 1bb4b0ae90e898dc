"""Buffers of the CPU program: slots that values share, shapes and alignment."""

from ingot.artifact.program_checks import inputs_of, outputs_of
from ingot.runtime.cpu.buffers import ValueBuffers, plan_slots
from tests.runtime.programs import PROGRAM, VALUES


def test_values_share_a_slot_only_when_their_lifetimes_do_not_overlap() -> None:
    slots = plan_slots(PROGRAM)
    assert slots["a.1"] != slots["x.1"]
    assert len(set(slots.values())) < len(slots)
    live: dict[int, str] = {}
    last_use = {name: i for i, step in enumerate(PROGRAM.steps) for name in inputs_of(step)}
    for index, step in enumerate(PROGRAM.steps):
        for name in outputs_of(step):
            before = live.get(slots[name])
            assert before is None or last_use[before] < index
            live[slots[name]] = name


def test_buffers_are_aligned_and_have_the_shapes_of_their_values() -> None:
    buffers = ValueBuffers(PROGRAM, 32)
    assert buffers["q.0"].shape == (32, 64)
    assert buffers["input_ids"].shape == (32,)
    assert all(buffers[name].ctypes.data % 64 == 0 for name in VALUES)
    assert buffers.num_bytes < sum(32 * max(1, facts.columns) * 8 for facts in VALUES.values())
