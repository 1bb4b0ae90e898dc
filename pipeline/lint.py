"""Lint of a checkpoint, quantized or not: everything that is wrong with it, where building stops at the first thing.

    files, configuration, shapes     what import refuses
    values                           NaN and Inf in tensors and scales, scales of zero
    zero points                      GPTQ layers whose zero points are off by one, or beyond the codes
    act-order                        g_idx out of order though desc_act is false (missing: refused by name)
    exclude lists                    modules listed as left alone that are quantized, and the other way round
    scales of inputs, KV cache       missing, zero or not finite, or there without a scheme

Checks of quantized layers are in lint_quantized.py. To add one: a generator of findings, and its line there or here.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ingot.errors import CheckpointError
from ingot.pipeline.checkpoint import Checkpoint
from ingot.pipeline.config import read_config
from ingot.pipeline.lint_quantized import Finding, checkpoint_findings, layer_findings
from ingot.pipeline.tensors import HEAD, check_tensors
from ingot.progress import Progress, silent

__all__ = ["Finding", "lint_checkpoint"]

_LAYER = re.compile(r"^model\.layers\.\d+\.(self_attn|mlp)\.\w+$")


def lint_checkpoint(path: Path, progress: Progress = silent) -> list[Finding]:
    """All findings, in the order of the checks; every tensor is read once, one in memory at a time."""
    try:
        checkpoint = Checkpoint.open(path)
    except CheckpointError as error:
        return [Finding("error", str(path), str(error))]
    findings = [*_structure(checkpoint), *_plain_values(checkpoint)]
    for done, tensor in enumerate(checkpoint.encoded.values(), start=1):
        findings += layer_findings(tensor, checkpoint.quantization)
        progress("decoding", done, len(checkpoint.encoded))
    return [*findings, *_exclude_lists(checkpoint, checkpoint.quantization), *checkpoint_findings(checkpoint)]


def _structure(checkpoint: Checkpoint) -> Iterator[Finding]:
    try:
        check_tensors(checkpoint, read_config(checkpoint))
    except CheckpointError as error:
        yield Finding("error", checkpoint.path.name, str(error))


def _plain_values(checkpoint: Checkpoint) -> Iterator[Finding]:
    try:
        checkpoint.check_finite()
    except CheckpointError as error:
        yield Finding("error", checkpoint.path.name, str(error))


def _exclude_lists(checkpoint: Checkpoint, quantization: Mapping[str, Any]) -> Iterator[Finding]:
    """What configuration and tensors say of the layers that are left in floats."""
    if not quantization:
        return
    listed = [str(item) for key in ("ignore", "modules_to_not_convert") for item in quantization.get(key) or ()]
    quantized = {name.removesuffix(".weight") for name in checkpoint.encoded}
    modules = quantized | {name.removesuffix(".weight") for name in checkpoint.tensors if name.endswith(".weight")}
    modules.add(HEAD.removesuffix(".weight"))  # a module of loaders even where it shares the table
    for item in listed:
        found = [module for module in modules if _matches(item, module)]
        if not found:
            yield Finding("warning", item, "is excluded from quantization, but there is no such module")
        for module in sorted(quantized.intersection(found)):
            yield Finding("error", module, f"is excluded from quantization ({item}), but it is quantized")
    for module in sorted(modules - quantized):
        expected = _LAYER.match(module) and not module.endswith("norm")
        head = f"{module}.weight" == HEAD and _targets_all_linear(quantization)
        if (expected or head) and not any(_matches(item, module) for item in listed):
            yield Finding("error", module, "is in floats, but nothing excludes it from quantization: loaders will fail")


def _targets_all_linear(quantization: Mapping[str, Any]) -> bool:
    """Whether compressed-tensors takes every Linear for quantized, the head too."""
    groups = quantization.get("config_groups") or {}
    return any("Linear" in (group.get("targets") or ()) for group in groups.values() if isinstance(group, Mapping))


def _matches(item: str, module: str) -> bool:
    if item.startswith("re:"):
        return re.match(item.removeprefix("re:"), module) is not None
    return module == item or item in module.split(".") or module.endswith(f".{item}")
