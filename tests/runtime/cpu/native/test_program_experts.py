"""Mixtures of experts in the native engine: logits of the reference, equal bits in any company, only what is hit."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from ingot.artifact.programs.cpu_program import OPERATIONS_FILE, WEIGHTS_FILE, Experts, read_cpu_program
from ingot.artifact.safetensors import MappedTensors
from ingot.pipeline.targets.cpu.writer import write_lowered
from ingot.runtime.cpu.kv_pool import KVPool
from ingot.runtime.cpu.native.program import NativeProgram
from ingot.runtime.forward_batch import FloatArray
from tests.oracle.moe_cases import MOE_CASES
from tests.parity import CHECKPOINTS, compare
from tests.runtime.cpu.native.kernel_cases import SETS, needs_library
from tests.runtime.cuda.batches import Growing, token_ids
from tests.simulators.cpu_program_in_numpy import NumpyCpuProgram
from tests.simulators.cpu_programs import PACKED, Entry, imported, lowered
from tests.tolerances import within

pytestmark = needs_library

BLOCKS, VOCAB = 16, 60
FAMILIES = [case.name for case in MOE_CASES]
INT4: Entry = ("quantize-weights", {"bits": 4, "block_size": 16, "symmetric": False})
MIXED: Entry = ("quantize-weights", {"bits": 8, "block_size": 0, "overrides": {"*.experts.1.*": "none"}})
LENGTHS = (23, 9, 14)
STEPS = {
    "a prompt at once": [[23, 0, 0]],
    "chunks": [[7, 0, 0], [1, 0, 0], [15, 0, 0]],
    "together": [[23, 9, 14]],
    "in turns": [[5, 1, 3], [1, 1, 1], [12, 7, 1], [5, 0, 9]],
}


def open_program(folder: Path, threads: int = 1, isa: str | None = None) -> NativeProgram:
    program, weights = read_cpu_program(folder / OPERATIONS_FILE), MappedTensors(folder / WEIGHTS_FILE)
    pool = KVPool(program.kv, BLOCKS * len(LENGTHS))
    return NativeProgram(program, weights, pool, max_batch_tokens=64, num_threads=threads, isa=isa)


def write(name: str, folder: Path, *passes: Entry) -> None:
    write_lowered(lowered(imported(CHECKPOINTS / name, *PACKED, *passes)), folder)


def logits(program: NativeProgram | NumpyCpuProgram, steps: list[list[int]]) -> list[FloatArray]:
    """Logits of each sequence, fed by the tokens of each step."""
    run = program.step if isinstance(program, NativeProgram) else program.forward
    tables = np.arange(len(LENGTHS) * BLOCKS).reshape(len(LENGTHS), BLOCKS).tolist()
    growing = Growing([token_ids(length, seed, VOCAB) for seed, length in enumerate(LENGTHS)], tables)
    rows: list[list[FloatArray]] = [[] for _ in LENGTHS]
    for counts in steps:
        found = np.split(run(growing.step(counts)).copy(), np.cumsum(counts)[:-1])
        for index, part in enumerate(found):
            rows[index].append(part)
    return [np.concatenate(parts) for parts in rows]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_has_the_logits_of_the_reference(name: str, tmp_path: Path) -> None:
    write(name, tmp_path)
    operations = read_cpu_program(tmp_path / OPERATIONS_FILE).operations
    assert any(isinstance(operation, Experts) for operation in operations)
    reference = NumpyCpuProgram(tmp_path, BLOCKS * len(LENGTHS))
    parity = compare(logits(open_program(tmp_path), STEPS["in turns"]), logits(reference, STEPS["in turns"]))
    assert within("parity.float32", parity.worst, scale=max(1.0, parity.largest / 4))


@pytest.mark.parametrize(("name", "form"), [("glm4_moe", INT4), ("phimoe", INT4), ("mixtral", MIXED)])
def test_bits_depend_on_no_company_no_threads_and_no_instruction_set(name: str, form: Entry, tmp_path: Path) -> None:
    write(name, tmp_path, form)
    token_by_token = np.repeat(np.eye(len(LENGTHS), dtype=int), LENGTHS, axis=0).tolist()
    alone = logits(open_program(tmp_path, isa=SETS[0]), token_by_token)
    reference = NumpyCpuProgram(tmp_path, BLOCKS * len(LENGTHS))
    parity = compare(logits(reference, STEPS["together"]), alone)
    assert within("parity.float32", parity.worst, scale=max(1.0, parity.largest / 4))
    for isa in SETS:
        for threads in (1, 3):
            for what, steps in STEPS.items():
                together = logits(open_program(tmp_path, threads, isa), steps)
                for ours, theirs in zip(together, alone, strict=True):
                    assert ours.tobytes() == theirs[: len(ours)].tobytes(), f"{what}, {isa}, {threads} threads"


def test_experts_that_no_token_chooses_are_not_read(tmp_path: Path) -> None:
    write("qwen3_moe", tmp_path)
    (operation,) = (one for one in read_cpu_program(tmp_path / OPERATIONS_FILE).operations if isinstance(one, Experts))
    finite = []
    for layer in operation.layers:
        shutil.copytree(tmp_path, tmp_path / "damaged", ignore=shutil.ignore_patterns("damaged"))
        tensor = MappedTensors(tmp_path / WEIGHTS_FILE).tensors[layer.matrix]
        with (tmp_path / "damaged" / WEIGHTS_FILE).open("r+b") as file:
            file.seek(tensor.offset)
            file.write(b"\xff" * tensor.num_bytes)  # NaN in 16 bits
        (found, *_) = logits(open_program(tmp_path / "damaged"), [[1, 0, 0]])
        finite.append(bool(np.isfinite(found).all()))
        shutil.rmtree(tmp_path / "damaged")
    count = len(operation.up)
    assert sum(finite) == 2 * (count - operation.chosen)
    assert finite[:count] == finite[count:]
