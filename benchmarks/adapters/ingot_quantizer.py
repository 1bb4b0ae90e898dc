"""Ingot's own quantizers in the packages' interface: a checkpoint and token ids in, a compressed-tensors folder out."""

import os

import numpy as np

from benchmarks.adapters.quantizing import Job, answer
from benchmarks.quantizers.cases import CHAINS, Setting
from ingot.passes.calibration import CalibrationFacts, calibrate_with
from ingot.passes.manager import PassManager
from ingot.pipeline.calibrate import CalibrationData, CalibrationEngine
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.checkpoint.config.decoder import read_config
from ingot.pipeline.checkpoint.tensors import tensor_names
from ingot.pipeline.interchange.folder import Source, new_folder, write_checkpoint
from ingot.pipeline.interchange.weight_sources import weights_of_model
from ingot.pipeline.interchange.writers import compressed_tensors
from ingot.pipeline.model.importer import import_checkpoint


def quantize(job: Job) -> None:
    """Methods: the names of CHAINS. Runs what `ingot export` runs: the quantization passes, without fusions."""
    os.environ["INGOT_THREADS"] = str(job.threads)
    checkpoint = Checkpoint.open(job.checkpoint)
    model = import_checkpoint(checkpoint)
    setting = Setting(job.bits, job.group_size, job.symmetric, job.keep)
    with calibrate_with(CalibrationEngine(_data(job))):
        PassManager([step.make(setting) for step in CHAINS[job.method]]).run(model)
    weights = list(weights_of_model(model, tensor_names(read_config(checkpoint))).values())
    contents = compressed_tensors.plan(Source(checkpoint, weights))
    with new_folder(job.output) as folder:
        write_checkpoint(folder, job.output.name, contents, checkpoint)


def _data(job: Job) -> CalibrationData:
    ids = job.token_ids()
    sequences, tokens = ids.shape
    facts = CalibrationFacts(job.sequences.name, "", ids.size, sequences, tokens, seed=0)
    return CalibrationData(facts, np.ascontiguousarray(ids))


if __name__ == "__main__":
    answer(quantize, ("onnxruntime", "numpy"))
