"""Programs of the native engine have the logits of the reference interpreter: all families, all forms of weights."""

from pathlib import Path

import numpy as np
import pytest

from ingot.artifact.programs.cpu_program import OPERATIONS_FILE, WEIGHTS_FILE, read_cpu_program
from ingot.artifact.safetensors import MappedTensors
from ingot.pipeline.targets.cpu.writer import write_lowered
from ingot.runtime.cpu.kv_pool import KVPool
from ingot.runtime.cpu.native.library import native_library
from ingot.runtime.cpu.native.program import NativeProgram
from ingot.runtime.forward_batch import FloatArray, Int64Array
from tests.each_case import each_case
from tests.oracle.cases import CASES
from tests.parity import CHECKPOINTS, compare
from tests.runtime.cuda.batches import Growing, token_ids
from tests.simulators.cpu_program_in_numpy import NumpyCpuProgram
from tests.simulators.cpu_programs import PACKED, Entry, imported, lowered
from tests.tolerances import within

pytestmark = pytest.mark.skipif(native_library() is None, reason="the library was not built")

FAMILIES = sorted(case.name for case in CASES)
FORMS: dict[str, tuple[Entry, ...]] = {
    "2 bits": (("quantize-weights", {"bits": 2, "block_size": 32, "symmetric": False}),),
    "3 bits": (("quantize-weights", {"bits": 3, "block_size": 32}),),
    "4 bits": (("quantize-weights", {"bits": 4, "block_size": 16, "symmetric": False}),),
    "8 bits per channel": (("quantize-weights", {"bits": 8, "block_size": 0}),),
    "float8": (("fp8", {}),),
}
BLOCKS = 16


def logits_of(program: NativeProgram | NumpyCpuProgram, ids: Int64Array) -> FloatArray:
    """Logits of a prompt, then of three single tokens."""
    run = program.step if isinstance(program, NativeProgram) else program.forward
    growing = Growing([ids], [list(range(BLOCKS))])
    return np.concatenate([run(growing.step([count])).copy() for count in (len(ids) - 3, 1, 1, 1)])


def native_program(folder: Path, threads: int = 1) -> NativeProgram:
    program, weights = read_cpu_program(folder / OPERATIONS_FILE), MappedTensors(folder / WEIGHTS_FILE)
    return NativeProgram(
        program, weights, KVPool(program.kv, BLOCKS), max_batch_tokens=32, num_threads=threads
    )  # fmt: skip


@each_case("family", FAMILIES)
def test_every_family_has_the_logits_of_the_reference(family: str, tmp_path: Path) -> None:
    write_lowered(lowered(imported(CHECKPOINTS / family, *PACKED)), tmp_path)
    ids = token_ids(14, 0, 60)
    ours, theirs = logits_of(native_program(tmp_path), ids), logits_of(NumpyCpuProgram(tmp_path, BLOCKS), ids)
    parity = compare([ours], [theirs])
    assert within("parity.float32", parity.worst, scale=max(1.0, parity.largest / 4))
    assert logits_of(native_program(tmp_path, 3), ids).tobytes() == ours.tobytes()


@pytest.mark.parametrize("form", FORMS)
def test_quantized_weights_have_the_logits_of_the_reference(form: str, tmp_path: Path) -> None:
    write_lowered(lowered(imported(CHECKPOINTS / "llama", *PACKED, *FORMS[form])), tmp_path)
    ids = token_ids(14, 0, 60)
    ours, theirs = logits_of(native_program(tmp_path), ids), logits_of(NumpyCpuProgram(tmp_path, BLOCKS), ids)
    parity = compare([ours], [theirs])
    assert within("parity.float32", parity.worst, scale=max(1.0, parity.largest / 4))
