"""autoawq 0.2.9 (archived) loads Ingot's AWQ exports.

Its CPU matmul needs intel_extension_for_pytorch, which current torch versions do not support. So it loads and unpacks
the checkpoint with its own code, and torch multiplies.
"""

from pathlib import Path
from typing import Any
from unittest import mock

import torch
from awq import AutoAWQForCausalLM
from awq.models import base
from awq.modules.linear import WQLinear_GEMM
from awq.utils.packing_utils import dequantize_gemm

from benchmarks.adapters.loading import LogitsOf, answer
from benchmarks.adapters.torch_logits import logits_of_model


def load(checkpoint: Path) -> LogitsOf:
    """The device's name only keeps it from importing the extension."""
    with mock.patch.object(base, "get_best_device", return_value="cuda:0"):
        loaded = AutoAWQForCausalLM.from_quantized(
            str(checkpoint), fuse_layers=False, device_map={"": "cpu"}, torch_dtype=torch.float16
        )
    model = loaded.model.float()
    for name, module in list(model.named_modules()):
        if isinstance(module, WQLinear_GEMM):
            model.set_submodule(name, _unpacked(module))
    return logits_of_model(model.eval())


def _unpacked(packed: Any) -> torch.nn.Linear:
    linear = torch.nn.Linear(packed.in_features, packed.out_features, bias=packed.bias is not None)
    weight = dequantize_gemm(packed.qweight, packed.qzeros, packed.scales, packed.w_bit, packed.group_size)  # [in, out]
    linear.weight = torch.nn.Parameter(weight.t().contiguous().float(), requires_grad=False)
    if packed.bias is not None:
        linear.bias = torch.nn.Parameter(packed.bias.float(), requires_grad=False)
    return linear


if __name__ == "__main__":
    answer(load, ("autoawq", "transformers", "torch"))
