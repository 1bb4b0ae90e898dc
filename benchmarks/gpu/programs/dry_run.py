"""Writes the programs of a dry run: tiny models, whose kernels are described instead of compiled."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

from safetensors.numpy import save_file
from tests.simulators.triton_interpreter import use_interpreter

from benchmarks.gpu.programs.cases import reference_of, transformed
from benchmarks.gpu.programs.models import DRY_SPECS, ProgramSpec
from benchmarks.gpu.programs.packing import LADDER_FILE, pack_artifact, pack_kernels
from benchmarks.gpu.programs.write import described, prepare, write_zip
from benchmarks.gpu.proofs.demo import REFERENCE
from benchmarks.gpu.proofs.load import SMOKE_KERNEL
from benchmarks.synthetic import write_checkpoint

use_interpreter()

from tests.runtime.cuda.artifacts import CONTEXT, buckets, model_of, write_artifact  # noqa: E402
from tests.runtime.cuda.batches import token_ids  # noqa: E402

from benchmarks.gpu.proofs import kernel_cases, ladder  # noqa: E402


def write_programs(folder: Path) -> Path:
    """Write tiny programs, their kernels described instead of compiled; return the folder."""
    for spec in DRY_SPECS:
        write_program(spec, folder)
    _write_cases(folder)
    needed = {**kernel_cases.kernels_of(kernel_cases.dry_cases(), narrow=False), "launch": SMOKE_KERNEL}
    pack_kernels(needed, described(needed), folder / kernel_cases.FILE)
    variants = ladder.rung_kernels(folder)
    pack_kernels(variants, described(variants), folder / LADDER_FILE)
    return folder


def write_program(spec: ProgramSpec, folder: Path) -> None:
    """Write one program without weights."""
    with TemporaryDirectory() as scratch:
        prepared = prepare(spec, Path(scratch))
    write_zip(prepared, described(prepared.lowered.shared.kernels), folder / f"{spec.name}.zip")


def _write_cases(folder: Path) -> None:
    """Write one small model with weights, for the parts "check" and "demo"."""
    with TemporaryDirectory() as scratch:
        checkpoint = _checkpoint(Path(scratch) / "checkpoint")
        steps = buckets(decode=(2,), ragged=4, sequences=2)
        made = write_artifact(model_of(checkpoint), Path(scratch) / "made", steps, "fp16")
        pack_artifact(made, folder / "check-llama.zip")
        pack_artifact(made, folder / "demo-fp16.zip")
        reference = reference_of(transformed(Path(scratch), checkpoint), token_ids(4), 3, (2, 2), 2)
    save_file({f"fp16.{key}": value for key, value in reference.items()}, folder / REFERENCE)


def _checkpoint(folder: Path) -> Path:
    """One layer, and a context as short as the buckets of the tests."""
    write_checkpoint(DRY_SPECS[0].shape, folder)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": CONTEXT}), "utf-8")
    return folder
