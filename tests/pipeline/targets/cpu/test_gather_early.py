"""After the last attention only rows of logits are computed, and their bits are those of all rows."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest

from ingot.artifact.programs.cpu_program import (
    OPERATIONS_FILE,
    WEIGHTS_FILE,
    Attend,
    Combine,
    CpuProgram,
    Normalize,
    read_cpu_program,
)
from ingot.artifact.safetensors import MappedTensors
from ingot.pipeline.targets.cpu import lowering
from ingot.pipeline.targets.cpu.writer import write_lowered
from ingot.runtime.cpu.kv_pool import KVPool
from ingot.runtime.cpu.native.library import native_library
from ingot.runtime.cpu.native.program import NativeProgram
from tests.each_case import each_case
from tests.oracle.cases import CASES
from tests.parity import CHECKPOINTS
from tests.runtime.cuda.batches import Growing, token_ids
from tests.simulators.cpu_program_in_numpy import NumpyCpuProgram
from tests.simulators.cpu_programs import PACKED, Entry, imported, lowered

FAMILIES = sorted(case.name for case in CASES)
INT4: Entry = ("quantize-weights", {"bits": 4, "block_size": 32})
UNPACKED = ("fold-constants", "fuse-gated-activation", "clean-up")
FORMS: tuple[Sequence[Entry], ...] = (PACKED, UNPACKED, (*PACKED, INT4))
IN_ALL_FORMS = ("gemma3_text", "llama")
FORM_OF_FAMILIES = [(family, FORMS[index % 3]) for index, family in enumerate(FAMILIES) if family not in IN_ALL_FORMS]
FORM_OF_FAMILIES += itertools.product(IN_ALL_FORMS, FORMS)
STEPS: tuple[tuple[list[int], str], ...] = (
    ([9, 5, 0], "last"),
    ([1, 4, 6], "none"),
    ([1, 2, 7], "last"),
    ([1, 1, 1], "last"),
    ([2, 1, 3], "all"),
)


def lowered_late(family: str, *passes: Entry) -> lowering.Lowered:
    """The program whose head alone gathers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lowering, "gather_early", lambda draft: None)
        return lowered(imported(CHECKPOINTS / family, *passes))


def logits_of(folder: Path, threads: int | None) -> list[bytes]:
    """Logits of steps by the engine with so many threads; None: by its simulation."""
    run = NumpyCpuProgram(folder, 6).forward if threads is None else _native(folder, threads).step
    growing = Growing([token_ids(20, i, 60) for i in range(3)], [[0, 3], [1, 4], [2, 5]])
    return [run(growing.step(counts, wanted)).tobytes() for counts, wanted in STEPS]


def _native(folder: Path, threads: int) -> NativeProgram:
    program, weights = read_cpu_program(folder / OPERATIONS_FILE), MappedTensors(folder / WEIGHTS_FILE)
    return NativeProgram(program, weights, KVPool(program.kv, 6), max_batch_tokens=32, num_threads=threads)


def head_rows(program: CpuProgram) -> set[str]:
    """Rows that operations after the last attention compute."""
    return {getattr(one, "rows", "tokens") for one in program.operations[program.head_start :]}


@each_case(("family", "passes"), FORM_OF_FAMILIES)
def test_no_bit_changes(family: str, passes: Sequence[Entry], tmp_path: Path) -> None:
    early, late = lowered(imported(CHECKPOINTS / family, *passes)), lowered_late(family, *passes)
    assert (head_rows(early.program), head_rows(late.program)) == ({"logits"}, {"tokens", "logits"})
    write_lowered(early, tmp_path / "early")
    write_lowered(late, tmp_path / "late")
    for threads in (None, 3) if native_library() is not None else (None,):
        assert logits_of(tmp_path / "early", threads) == logits_of(tmp_path / "late", threads)


@each_case("family", FAMILIES)
def test_the_rest_of_the_last_layer_adds_in_place_but_for_one_sum(family: str) -> None:
    early, late = lowered(imported(CHECKPOINTS / family, *PACKED)).program, lowered_late(family, *PACKED).program
    sums = [one for one in early.operations if isinstance(one, Combine) and one.function == "add"]
    is_a_norm = any(isinstance(one, Normalize) and one.residual for one in late.operations)
    assert len(sums) == (0 if is_a_norm else 1)
    assert len(early.operations) == len(late.operations) + len(sums)


def test_operations_before_the_last_attention_compute_all_rows() -> None:
    program = lowered(imported(CHECKPOINTS / "gemma3_text", *PACKED)).program
    for operation in program.operations[: program.head_start]:
        assert isinstance(operation, Attend) or getattr(operation, "rows", "tokens") == "tokens"
        assert program.buffers[operation.span_written(program.matrices).buffer].rows == "tokens"
