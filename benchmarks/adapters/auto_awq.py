"""autoawq 0.2.9 (archived): AWQ with its clip search; writes the AWQ gemm format."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from awq import AutoAWQForCausalLM
from awq.quantize.quantizer import AwqQuantizer

from benchmarks.adapters.quantizing import Job, answer

_CLIPPED_ROWS = 64


class MendedQuantizer(AwqQuantizer):  # type: ignore[misc]  # autoawq carries no types
    """Copy what its search over scales means to restore after each try.

    On a CPU `{k: v.cpu() for ...}` returns the live tensors, not copies, so each try starts from the weights that the
    previous one quantized, and the model becomes noise.
    """

    def _compute_best_scale(self, x: Any, w_mean: Any, x_mean: Any, module2inspect: Any, *rest: Any) -> Any:
        live = module2inspect.state_dict()
        module2inspect.state_dict = lambda: {name: tensor.clone() for name, tensor in live.items()}
        try:
            return super()._compute_best_scale(x, w_mean, x_mean, module2inspect, *rest)
        finally:
            del module2inspect.state_dict


def quantize(job: Job) -> None:
    """Method: awq."""
    torch.set_num_threads(job.threads)
    ids = job.token_ids()
    model = AutoAWQForCausalLM.from_pretrained(str(job.checkpoint), torch_dtype=torch.float32, device_map="cpu")
    if job.keep:
        model.modules_to_not_convert = list(job.keep)
        model.get_layers_for_scaling = without_kept(model.get_layers_for_scaling)
    model.quantize(
        None,
        quant_config={
            "zero_point": not job.symmetric,
            "q_group_size": job.group_size,
            "w_bit": job.bits,
            "version": "GEMM",
        },
        calib_data=ids.tolist(),
        max_calib_samples=len(ids),
        max_calib_seq_len=ids.shape[1],
        apply_clip=clips(model.model.model.layers),
        quantizer_cls=MendedQuantizer,
    )
    model.save_quantized(str(job.output))


def without_kept(scaled: Callable[..., list[dict[str, Any]]]) -> Callable[..., list[dict[str, Any]]]:
    """Drop the settings of excluded layers: it looks up their inputs, which do not exist."""

    def found(module: Any, inputs: Mapping[str, Any], kwargs: Any) -> list[dict[str, Any]]:
        groups = scaled(module, defaultdict(lambda: None, inputs), kwargs)
        return [group for group in groups if group["inp"] is not None]

    return found


def clips(layers: torch.nn.ModuleList) -> bool:
    """Clip only if 64 divides the rows: its clip search takes 64 output rows at a time and fails otherwise."""
    linears = [m for m in layers.modules() if isinstance(m, torch.nn.Linear)]
    return all(linear.out_features % _CLIPPED_ROWS == 0 for linear in linears)


if __name__ == "__main__":
    answer(quantize, ("autoawq", "transformers", "torch"))
