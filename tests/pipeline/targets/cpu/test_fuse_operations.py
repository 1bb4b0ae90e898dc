"""Operations of lowered models: norms, gates, sums and head rows need none of their own, unless a form forbids it."""

from collections import Counter

import pytest

from ingot.artifact.programs.cpu_program import Attend, Combine, CpuProgram, Embed, Linear, Normalize, Rotate
from tests.parity import CHECKPOINTS
from tests.simulators.cpu_programs import PACKED, Entry, imported, lowered

UNPACKED = ("fold-constants", "fuse-gated-activation", "clean-up")
INT4: Entry = ("quantize-weights", {"bits": 4, "block_size": 32})


def program(name: str, *passes: Entry) -> CpuProgram:
    return lowered(imported(CHECKPOINTS / name, *passes)).program


def layer(found: CpuProgram, number: int = 1) -> list[str]:
    """Kinds of a layer's operations."""
    return [one.kind for one in found.operations if f"layers.{number}." in one.node]


@pytest.mark.parametrize("name", ["llama", "qwen2", "granite", "phi3", "smollm3"])
def test_a_layer_is_five_operations_and_the_head_one(name: str) -> None:
    found = program(name, *PACKED)
    assert layer(found) == ["linear", "attend", "linear", "linear", "linear"]
    assert [one.kind for one in found.operations[-1:]] == ["linear"]
    assert isinstance(found.operations[0], Embed)


def test_norms_per_head_are_in_place_and_post_norms_add_to_the_residual_stream() -> None:
    found = program("gemma3_text", *PACKED)
    norms = [one for one in found.operations if isinstance(one, Normalize) and "layers.1." in one.node]
    per_head, after = norms[:2], norms[2:]
    assert all(one.groups > 1 and one.output == one.input for one in per_head)
    assert [one.output == one.residual for one in after] == [True, True]
    assert len(after) == 2


def test_an_activation_of_many_nodes_is_the_up_projections() -> None:
    found = program("apertus", *PACKED)
    ups = [one for one in found.operations if isinstance(one, Linear) and one.activation == "xielu"]
    assert [len(one.numbers) for one in ups] == [4] * sum(isinstance(one, Attend) for one in found.operations)
    assert not any(isinstance(one, Combine) and one.function != "add" for one in found.operations)


@pytest.mark.parametrize(("name", "norms"), [("hunyuan_v1_dense", 2), ("ministral3", 0)])
def test_rotations_that_attention_does_not_apply_are_in_place(name: str, norms: int) -> None:
    found = program(name, *PACKED)
    rotations = [one for one in found.operations if isinstance(one, Rotate) and "layers.1." in one.node]
    assert [one.output == one.input for one in rotations] == [True, True]
    per_head = [one for one in found.operations if isinstance(one, Normalize) and "layers.1." in one.node]
    assert [one.output == one.input for one in per_head] == [True] * norms


def test_the_residual_stream_stays_in_one_buffer_until_rows_are_gathered() -> None:
    found = program("llama", *PACKED)
    stream = found.operations[0].output.buffer
    adds = [one for one in found.operations if isinstance(one, Linear) and one.store == "add"]
    gathered = next(one for one in found.operations if isinstance(one, Combine))
    assert gathered.function == "add"
    assert [one.output.buffer for one in adds] == [stream] * (len(adds) - 1) + [gathered.output.buffer]
    assert len(adds) == 2 * sum(isinstance(one, Attend) for one in found.operations) - 1


@pytest.mark.parametrize("passes", [PACKED, UNPACKED], ids=["packed", "separate"])
@pytest.mark.parametrize("form", [(), (INT4,)], ids=["floats", "int4"])
def test_gate_and_up_share_a_matrix_of_pairs(passes: tuple[Entry, ...], form: tuple[Entry, ...]) -> None:
    found = program("llama", *passes, *form)
    gates = [one for one in found.operations if isinstance(one, Linear) and one.store == "gate"]
    assert [one.activation for one in gates] == ["silu"] * len(gates)
    assert all(found.matrices[one.matrix].pairs for one in gates)
    assert len(gates) == sum(isinstance(one, Attend) for one in found.operations)


def test_gate_and_up_of_different_forms_are_two_layers_and_a_gate() -> None:
    mixed = ("quantize-weights", {"bits": 4, "block_size": 32, "overrides": {"*.up_proj": {"bits": 8}}})
    found = program("llama", *UNPACKED, mixed)
    assert Counter(layer(found))["combine"] == 1
    gate = next(one for one in found.operations if isinstance(one, Combine))
    assert (gate.function, gate.activation) == ("gate", "silu")


def test_a_step_without_logits_ends_after_the_last_attention() -> None:
    found = program("llama", *PACKED)
    assert isinstance(found.operations[found.head_start - 1], Attend)
    assert not any(isinstance(one, Attend) for one in found.operations[found.head_start :])


def test_a_tied_head_reads_the_tables_matrix() -> None:
    found = program("llama-tied-biases", *PACKED, INT4)
    table, head = found.operations[0], found.operations[-1]
    assert isinstance(table, Embed)
    assert isinstance(head, Linear)
    assert table.table == head.matrix
    assert (head.rows, head.output.buffer) == ("logits", "logits")


def test_softcaps_and_factors_are_in_the_linear_layers() -> None:
    found = program("gemma2", *PACKED)
    head, table = found.operations[-1], found.operations[0]
    assert isinstance(head, Linear)
    assert isinstance(table, Embed)
    assert head.cap > 0
    assert table.scale > 1
    assert all(one.kind != "combine" for one in found.operations)


def test_buffers_share_places_when_their_lifetimes_do_not_overlap() -> None:
    found = program("llama", *PACKED)
    total = sum(buffer.columns for name, buffer in found.buffers.items() if name != "logits")
    assert found.arena_floats < total / 2
