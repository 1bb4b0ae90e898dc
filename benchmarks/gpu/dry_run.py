"""Runs the benchmark without a GPU: tiny shapes on the device that interprets kernels. Times are meaningless."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

from safetensors.numpy import save_file
from tests.simulators.triton_interpreter import use_interpreter

from benchmarks.gpu.cases import built, reference_of
from benchmarks.gpu.demo import REFERENCE
from benchmarks.gpu.models import DRY_SPECS
from benchmarks.gpu.packing import pack_artifact
from benchmarks.gpu.programs import described, prepare, write_zip
from benchmarks.synthetic import write_checkpoint
from ingot.runtime.cuda.device import Device
from ingot.runtime.cuda.stopwatch import HostStopwatch, Stopwatch

use_interpreter()

from tests.runtime.cuda.artifacts import CONTEXT, buckets, model_of, write_artifact  # noqa: E402
from tests.runtime.cuda.batches import token_ids  # noqa: E402
from tests.simulators.interpreted_device import InterpretedDevice  # noqa: E402


class DryMachine:
    """A device that interprets kernels. Implements `device.Machine`."""

    is_dry = True
    torch_device = "cpu"

    def open(self) -> Device:
        """A new one, on which copies end at once."""
        return InterpretedDevice(hasty=True)

    def stopwatch(self, device: Device) -> Stopwatch:
        """The computer's clock."""
        return HostStopwatch(device)


def write_programs(folder: Path) -> Path:
    """Write tiny programs, their kernels described instead of compiled; return the folder."""
    for spec in DRY_SPECS:
        with TemporaryDirectory() as scratch:
            prepared = prepare(spec, Path(scratch))
        write_zip(prepared, described(prepared.lowered.shared.kernels), folder / f"{spec.name}.zip")
    _write_cases(folder)
    return folder


def _write_cases(folder: Path) -> None:
    """Write one small model with weights, for the parts "check" and "demo"."""
    with TemporaryDirectory() as scratch:
        checkpoint = _checkpoint(Path(scratch) / "checkpoint")
        steps = buckets(decode=(2,), ragged=4, sequences=2)
        made = write_artifact(model_of(checkpoint), Path(scratch) / "made", steps, "fp16")
        pack_artifact(made, folder / "check-llama.zip")
        pack_artifact(made, folder / "demo-fp16.zip")
        reference = reference_of(built(Path(scratch), checkpoint, target="cpu"), token_ids(4), 3, (2, 2), 2)
    save_file({f"fp16.{key}": value for key, value in reference.items()}, folder / REFERENCE)


def _checkpoint(folder: Path) -> Path:
    """One layer, and a context as short as the buckets of the tests."""
    write_checkpoint(DRY_SPECS[0].shape, folder)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": CONTEXT}), "utf-8")
    return folder
