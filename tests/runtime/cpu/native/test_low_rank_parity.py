"""Adapters in PEFT's form, in programs of every kind of decoder: as if they were merged into the weights."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ingot.artifact.peft import CONFIG, WEIGHTS
from ingot.artifact.programs.cpu_program import OPERATIONS_FILE, read_cpu_program
from ingot.artifact.programs.projections import Projection
from ingot.passes.manager import PassManager
from ingot.passes.registry import make_pass
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.checkpoint.formats.decoded import load
from ingot.pipeline.model.importer import import_checkpoint
from ingot.pipeline.targets.cpu.writer import write_lowered
from ingot.runtime.adapters import Adapter, read_adapter
from ingot.runtime.cpu.native.library import native_library
from ingot.runtime.cpu.native.program import NativeProgram
from ingot.runtime.forward_batch import FloatArray, ForwardBatch
from tests.data_paths import ROOT
from tests.each_case import each_case
from tests.parity import CHECKPOINTS
from tests.runtime.cpu.native.test_low_rank import with_slots
from tests.runtime.cpu.native.test_program_parity import BLOCKS, FORMS, native_program
from tests.runtime.cuda.batches import Growing, token_ids
from tests.simulators.cpu_program_in_numpy import NumpyCpuProgram
from tests.simulators.cpu_programs import PACKED, Entry, lowered
from tests.tolerances import within

pytestmark = pytest.mark.skipif(native_library() is None, reason="the library was not built")

UNPACKED = ("fold-constants", "fuse-gated-activation", "clean-up")
SAVED = ROOT / "tests" / "fixtures" / "adapters"  # by PEFT
RANK, ALPHA = 5, 8
# Norms of heads, caps, multipliers, biases, packed and transposed weights, activations, latent attention, experts.
FAMILIES = ("llama", "apertus", "gemma2", "glm4", "gpt2", "granite", "mixtral", "opt", "phi3", "qwen3", "youtu")
TOKENS = 14


def in_float32(source: Path, folder: Path) -> Checkpoint:
    """A copy of a checkpoint with weights in 32 bits: merging into 16 rounds."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    stored = Checkpoint.open(source).tensors
    save_file({name: np.asarray(load(one), np.float32) for name, one in stored.items()}, folder / "model.safetensors")
    return Checkpoint.open(folder)


def write_program(folder: Path, checkpoint: Checkpoint, passes: Sequence[Entry]) -> tuple[Projection, ...]:
    """Write the checkpoint's program; return what adapters can change in it."""
    model = import_checkpoint(checkpoint)
    PassManager([make_pass(one) if isinstance(one, str) else make_pass(*one) for one in passes]).run(model)
    write_lowered(lowered(model), folder)
    return read_cpu_program(folder / OPERATIONS_FILE).projections


def write_adapter(folder: Path, projections: Sequence[Projection], *, is_transposed: bool = False) -> Path:
    """A folder as PEFT's, which changes every module a little, but for the head: it may be the table, too."""
    rng, tensors = np.random.default_rng(0), {}
    for one in {each.module: each for each in projections if each.module != "lm_head"}.values():
        for part, shape in (("A", (RANK, one.columns)), ("B", (one.rows, RANK))):
            values = rng.standard_normal(shape) / np.sqrt(one.columns if part == "A" else 10 * RANK)
            tensors[f"base_model.model.{one.module}.lora_{part}.weight"] = values.astype(np.float32)
    folder.mkdir()
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "fan_in_fan_out": is_transposed}
    (folder / CONFIG).write_text(json.dumps(config))
    save_file(tensors, folder / WEIGHTS)
    return folder


def steps() -> list[ForwardBatch]:
    """A prompt, then single tokens."""
    growing = Growing([token_ids(TOKENS, 0, 48)], [list(range(BLOCKS))])
    return [growing.step([count]) for count in (TOKENS - 3, 1, 1, 1)]


def logits_of(program: NativeProgram | NumpyCpuProgram, adapter: Adapter | None = None) -> FloatArray:
    """Logits of the steps, with the adapter in slot 0."""
    run = program.step if isinstance(program, NativeProgram) else program.forward
    if isinstance(program, NumpyCpuProgram) and adapter is not None:
        program.adapters[0] = adapter
    elif isinstance(program, NativeProgram) and adapter is not None:
        program.load_adapter(0, adapter, slots=1)
    slots = [-1 if adapter is None else 0]
    return np.concatenate([run(with_slots(step, slots)).copy() for step in steps()])


def check_merged(base: Path, merged: Path, adapter: Adapter, name: str) -> None:
    plain, want = logits_of(native_program(base)), logits_of(native_program(merged))
    got = logits_of(native_program(base, threads=2), adapter)
    largest = float(np.abs(want).max())
    error = float(np.abs(got - want).max()) / largest
    assert np.abs(plain - want).max() > 0.01 * largest
    assert within("adapters.merged", error, name)


@each_case(("index", "family"), list(enumerate(FAMILIES)))
def test_an_adapter_of_every_layer_equals_the_merged_checkpoint(index: int, family: str, tmp_path: Path) -> None:
    passes, checkpoint = (PACKED, UNPACKED)[index % 2], in_float32(CHECKPOINTS / family, tmp_path / "checkpoint")
    projections = write_program(tmp_path / "base", checkpoint, passes)
    assert projections
    folder = write_adapter(tmp_path / "adapter", projections, is_transposed=family == "gpt2")
    write_program(tmp_path / "merged", checkpoint.with_adapter(folder), passes)
    check_merged(tmp_path / "base", tmp_path / "merged", read_adapter(family, folder, projections), family)


@each_case("passes", [PACKED, UNPACKED])
@each_case("kind", ["attention", "patterns"])
def test_what_peft_saved_equals_its_merge(kind: str, passes: Sequence[str], tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(SAVED / "checkpoint")
    projections = write_program(tmp_path / "base", checkpoint, passes)
    write_program(tmp_path / "merged", checkpoint.with_adapter(SAVED / kind), passes)
    check_merged(tmp_path / "base", tmp_path / "merged", read_adapter(kind, SAVED / kind, projections), kind)


@each_case("form", FORMS)
def test_quantized_weights_and_an_adapter_equal_the_reference(form: str, tmp_path: Path) -> None:
    projections = write_program(tmp_path / "base", Checkpoint.open(CHECKPOINTS / "llama"), (*PACKED, *FORMS[form]))
    folder = write_adapter(tmp_path / "adapter", projections)
    adapter = read_adapter(form, folder, projections)
    want = logits_of(NumpyCpuProgram(tmp_path / "base", BLOCKS), adapter)
    error = float(np.abs(logits_of(native_program(tmp_path / "base"), adapter) - want).max())
    assert within("parity.float32", error, scale=max(1.0, float(np.abs(want).max()) / 4))
