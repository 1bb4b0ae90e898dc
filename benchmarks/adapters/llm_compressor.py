"""llm-compressor: GPTQ (static act-order), AWQ, and AWQ followed by GPTQ; writes compressed-tensors."""

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers import Modifier
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier, default_mappings
from llmcompressor.pipelines.cache import IntermediatesCache
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.adapters.quantizing import Job, answer


def quantize(job: Job) -> None:
    """Methods: gptq, awq, awq+gptq."""
    # Version 0.14 pins every activation, which raises without an accelerator to pin memory for.
    IntermediatesCache._pin_intermediate = classmethod(lambda cls, intermediate: None)
    torch.set_num_threads(job.threads)
    model = AutoModelForCausalLM.from_pretrained(job.checkpoint, dtype=torch.float32)
    ids = job.token_ids()
    rows = {"input_ids": ids.tolist(), "attention_mask": [[1] * ids.shape[1]] * len(ids)}
    oneshot(
        model=model,
        dataset=Dataset.from_dict(rows),
        recipe=_recipe(job),
        max_seq_length=ids.shape[1],
        num_calibration_samples=len(ids),
        shuffle_calibration_samples=False,
    )
    model.save_pretrained(job.output, save_compressed=True)
    AutoTokenizer.from_pretrained(job.checkpoint).save_pretrained(job.output)


def _recipe(job: Job) -> list[Modifier]:
    weights = QuantizationArgs(
        num_bits=job.bits, type="int", symmetric=job.symmetric, strategy="group", group_size=job.group_size
    )
    scheme = {"weights": QuantizationScheme(targets=["Linear"], weights=weights)}
    ignore = ["lm_head", *(f"re:.*{name}$" for name in job.keep)]
    rounding: dict[str, Modifier] = {
        "gptq": GPTQModifier(config_groups=scheme, ignore=ignore),
        "awq": QuantizationModifier(config_groups=scheme, ignore=ignore),
    }
    # It divides by the loss of each scaled group, which is zero if nothing of the group is quantized.
    scaled = [mapping for mapping in default_mappings if not _is_kept(mapping.balance_layers, job.keep)]
    recipes = {
        "gptq": [rounding["gptq"]],
        "awq": [AWQModifier(mappings=scaled), rounding["awq"]],
        "awq+gptq": [AWQModifier(mappings=scaled), rounding["gptq"]],
    }
    return recipes[job.method]


def _is_kept(patterns: list[str], keep: tuple[str, ...]) -> bool:
    """Whether every layer of a group stays unquantized; its patterns end like "down_proj$"."""
    return bool(keep) and all(pattern.removesuffix("$").endswith(keep) for pattern in patterns)


if __name__ == "__main__":
    answer(quantize, ("llmcompressor", "compressed-tensors", "transformers", "torch"))
