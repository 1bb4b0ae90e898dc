"""auto-round: signed gradient descent on the rounding, 200 steps a layer; writes compressed-tensors."""

import torch
from auto_round import AutoRound
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.adapters.quantizing import Job, answer

_BATCH = 8  # its default


def quantize(job: Job) -> None:
    """Method: auto-round."""
    torch.set_num_threads(job.threads)
    model = AutoModelForCausalLM.from_pretrained(job.checkpoint, dtype=torch.float32)
    ids = torch.from_numpy(job.token_ids())
    batches = [{"input_ids": part, "attention_mask": torch.ones_like(part)} for part in torch.split(ids, _BATCH)]
    rounding = AutoRound(
        model,
        AutoTokenizer.from_pretrained(job.checkpoint),
        bits=job.bits,
        group_size=job.group_size,
        sym=job.symmetric,
        layer_config=_kept(model, job.keep),
        dataset=batches,
        nsamples=len(ids),
        seqlen=ids.shape[1],
        batch_size=_BATCH,
        device_map="cpu",
        amp=False,
        enable_torch_compile=False,  # on a CPU compiling takes longer than it saves
    )
    rounding.quantize_and_save(str(job.output), format="auto_gptq")


def _kept(model: torch.nn.Module, keep: tuple[str, ...]) -> dict[str, dict[str, object]]:
    """Layers that stay in 16 bits or more."""
    names = [name for name, _ in model.named_modules() if name.endswith(keep)] if keep else []
    return {name: {"bits": 16, "data_type": "float"} for name in names}


if __name__ == "__main__":
    answer(quantize, ("auto-round", "transformers", "torch"))
