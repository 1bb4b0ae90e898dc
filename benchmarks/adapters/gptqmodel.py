"""gptqmodel: GPTQ with group-aware or plain act-order, and AWQ; writes the GPTQ and AWQ gemm formats."""

import os

# Version 7.6 sizes its pool by the cores and then requires two workers for loading: on two cores it would not start.
os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")

import torch
from gptqmodel import BACKEND, GPTQModel
from gptqmodel.quantization.config import AWQConfig, BaseQuantizeConfig, GPTQConfig

from benchmarks.adapters.quantizing import Job, answer


def quantize(job: Job) -> None:
    """Methods: gptq (group-aware order, its default), gptq-act-order, awq."""
    torch.set_num_threads(job.threads)
    # Its AWQ kernels support only 16 bits.
    dtype = torch.float16 if job.method == "awq" else torch.float32
    model = GPTQModel.load(str(job.checkpoint), _config(job), dtype=dtype)
    samples = [{"input_ids": row.tolist(), "attention_mask": [1] * len(row)} for row in job.token_ids()]
    # By default it picks an AWQ kernel that needs a GPU, even to pack weights.
    model.quantize(samples, backend=BACKEND.AWQ_TORCH if job.method == "awq" else BACKEND.AUTO)
    model.save(str(job.output))


def _config(job: Job) -> BaseQuantizeConfig:
    options = {
        "bits": job.bits,
        "group_size": job.group_size,
        "sym": job.symmetric,
        "device": "cpu",
        "dynamic": {rf"-:.*\.{name}": {} for name in job.keep} or None,  # "-:" excludes a layer
    }
    if job.method == "awq":
        return AWQConfig(**options)
    return GPTQConfig(**options, desc_act=job.method == "gptq-act-order")


if __name__ == "__main__":
    answer(quantize, ("gptqmodel", "transformers", "torch"))
