"""auto-gptq 0.7.1 (archived): GPTQ with act-order; writes the GPTQ format, version 1."""

import shutil
from unittest import mock

import torch
from auto_gptq import AutoGPTQForCausalLM, BaseQuantizeConfig
from auto_gptq.modeling import _base
from auto_gptq.modeling._base import BaseGPTQForCausalLM

from benchmarks.adapters.quantizing import Job, answer


def quantize(job: Job) -> None:
    """Methods: gptq (act-order), gptq-plain."""
    torch.set_num_threads(job.threads)
    # It supports only the first GPU, and requires one when a model is loaded; nothing else needs it.
    _base.CUDA_0 = _base.CPU
    torch.cuda.synchronize = lambda device=None: None
    config = BaseQuantizeConfig(
        bits=job.bits, group_size=job.group_size, sym=job.symmetric, desc_act=job.method == "gptq"
    )
    with mock.patch.object(torch.cuda, "is_available", return_value=True):
        model = AutoGPTQForCausalLM.from_pretrained(str(job.checkpoint), config, torch_dtype=torch.float32)
    _leave_out(model, job.keep)
    ids = torch.from_numpy(job.token_ids())
    model.quantize([{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in ids])
    model.save_quantized(str(job.output), use_safetensors=True)
    _name_as_others_do(job)


def _leave_out(model: BaseGPTQForCausalLM, keep: tuple[str, ...]) -> None:
    """Exclude layers by editing the class's list of matrices; auto-gptq has no option for it."""
    groups = [[name for name in group if not name.endswith(keep)] for group in model.inside_layer_modules]
    if keep:
        model.inside_layer_modules = [group for group in groups if group]


def _name_as_others_do(job: Job) -> None:
    """Rename its file gptq_model-4bit-128g.safetensors, which only auto-gptq finds."""
    (file,) = job.output.glob("*.safetensors")
    file.rename(job.output / "model.safetensors")
    for tokenizer_file in job.checkpoint.glob("tokenizer*"):
        shutil.copy(tokenizer_file, job.output)


if __name__ == "__main__":
    answer(quantize, ("auto-gptq", "transformers", "torch"))
