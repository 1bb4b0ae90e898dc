"""gptqmodel: GPTQ with group-aware or plain act-order, and AWQ; writes the GPTQ and AWQ gemm formats."""

import os

# Version 7.6 sizes its pool by the cores and then wants two workers for loading: on two cores it would not start.
os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")

import torch
from gptqmodel import BACKEND, GPTQModel
from gptqmodel.quantization.config import AWQConfig, BaseQuantizeConfig, GPTQConfig

from benchmarks.adapters.quantizing import Job, answer


def quantize(job: Job) -> None:
    """Methods: gptq (group-aware order, its default), gptq-act-order, awq."""
    torch.set_num_threads(job.threads)
    model = GPTQModel.load(str(job.checkpoint), _config(job), dtype=torch.float32)
    samples = [{"input_ids": row.tolist(), "attention_mask": [1] * len(row)} for row in job.token_ids()]
    model.quantize(samples, backend=BACKEND.AUTO)
    model.save(str(job.output))


def _config(job: Job) -> BaseQuantizeConfig:
    options = {
        "bits": job.bits,
        "group_size": job.group_size,
        "sym": job.symmetric,
        "device": "cpu",
        "dynamic": {rf"-:.*\.{name}": {} for name in job.keep} or None,  # "-:" leaves a layer out
    }
    if job.method == "awq":
        return AWQConfig(**options)
    return GPTQConfig(**options, desc_act=job.method == "gptq-act-order")


if __name__ == "__main__":
    answer(quantize, ("gptqmodel", "transformers", "torch"))
