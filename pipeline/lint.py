"""Lint of a checkpoint, quantized or not: everything that is wrong with it, where building stops at the first thing.

    files, configuration, shapes     what import refuses
    values                           NaN and Inf in tensors and scales, scales of zero
    zero points                      symmetric GPTQ layers with zero points off by one: the wrong version is declared
    exclude lists                    modules listed as left alone that are quantized, and the other way round
    KV scales                        a kv_cache_scheme whose layers lack k_scale or v_scale

To add a check: a generator of findings, and its line in lint_checkpoint.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ingot.errors import CheckpointError
from ingot.pipeline.checkpoint import Checkpoint
from ingot.pipeline.config import read_config
from ingot.pipeline.formats.encoded import load
from ingot.pipeline.formats.quantized import QuantizedWeight
from ingot.pipeline.formats.quantized_folder import quantization_of
from ingot.pipeline.safetensors_file import StoredTensor, read_header
from ingot.pipeline.tensors import HEAD, check_tensors
from ingot.progress import Progress, silent

_LAYER = re.compile(r"^model\.layers\.\d+\.(self_attn|mlp)\.\w+$")


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong (error) or looks wrong (warning), and the tensor, module or file it is about."""

    severity: Literal["error", "warning"]
    where: str
    message: str


def lint_checkpoint(path: Path, progress: Progress = silent) -> list[Finding]:
    """All findings, in the order of the checks; every tensor is read once, one in memory at a time."""
    try:
        checkpoint = Checkpoint.open(path)
    except CheckpointError as error:
        return [Finding("error", str(path), str(error))]
    findings = [*_structure(checkpoint), *_plain_values(checkpoint)]
    quantization = _quantization(checkpoint)
    for done, tensor in enumerate(checkpoint.encoded.values(), start=1):
        findings += _layer(tensor.name, checkpoint, quantization)
        progress("decoding", done, len(checkpoint.encoded))
    return [*findings, *_exclude_lists(checkpoint, quantization), *_kv_scales(checkpoint, quantization)]


def _quantization(checkpoint: Checkpoint) -> Mapping[str, Any]:
    if checkpoint.path.is_file():
        return {}
    return quantization_of(checkpoint.folder, json.loads(checkpoint.config_file.read_bytes())) or {}


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


def _layer(name: str, checkpoint: Checkpoint, quantization: Mapping[str, Any]) -> Iterator[Finding]:
    try:
        weight = checkpoint.encoded[name].read()
    except CheckpointError as error:
        yield Finding("error", name, str(error))
        return
    if not isinstance(weight, QuantizedWeight):
        return
    zeros = int(np.count_nonzero(weight.scales == 0))
    if zeros:
        yield Finding("warning", name, f"{zeros} of {weight.scales.size} scales are 0: their weights are lost")
    if weight.zero_points is not None and quantization.get("quant_method") == "gptq":
        yield from _zero_points(name, weight.zero_points, quantization)


def _zero_points(name: str, points: np.ndarray[Any, Any], quantization: Mapping[str, Any]) -> Iterator[Finding]:
    middle, declared = 1 << (quantization["bits"] - 1), quantization.get("checkpoint_format", "gptq")
    lowest, highest = int(points.min()), int(points.max())
    if quantization.get("sym") and (lowest, highest) in ((middle - 1,) * 2, (middle + 1,) * 2):
        other = "gptq" if declared == "gptq_v2" else "gptq_v2"
        yield Finding(
            "error",
            name,
            f"its zero points are {lowest}, but sym means {middle}: they are stored as {other} stores them, and "
            f"checkpoint_format says {declared}",
        )
    elif quantization.get("sym") and (lowest, highest) != (middle, middle):
        yield Finding("warning", name, f"sym means zero points of {middle}, but they go from {lowest} to {highest}")


def _exclude_lists(checkpoint: Checkpoint, quantization: Mapping[str, Any]) -> Iterator[Finding]:
    """What configuration and tensors say of the layers that are left in floats."""
    if not quantization:
        return
    listed = [str(item) for key in ("ignore", "modules_to_not_convert") for item in quantization.get(key) or ()]
    quantized = {name.removesuffix(".weight") for name in checkpoint.encoded}
    modules = quantized | {name.removesuffix(".weight") for name in checkpoint.tensors if name.endswith(".weight")}
    for item in listed:
        found = [module for module in modules if _matches(item, module)]
        if not found:
            yield Finding("warning", item, "is excluded from quantization, but there is no such module")
        for module in sorted(quantized.intersection(found)):
            yield Finding("error", module, f"is excluded from quantization ({item}), but it is quantized")
    for module in sorted(modules - quantized):
        expected = _LAYER.match(module) and not module.endswith("norm")
        head = f"{module}.weight" == HEAD and quantization.get("quant_method") == "compressed-tensors"
        if (expected or head) and not any(_matches(item, module) for item in listed):
            yield Finding("error", module, "is in floats, but nothing excludes it from quantization: loaders will fail")


def _matches(item: str, module: str) -> bool:
    if item.startswith("re:"):
        return re.match(item.removeprefix("re:"), module) is not None
    return module == item or item in module.split(".") or module.endswith(f".{item}")


def _kv_scales(checkpoint: Checkpoint, quantization: Mapping[str, Any]) -> Iterator[Finding]:
    if not quantization.get("kv_cache_scheme"):
        return
    stored: dict[str, StoredTensor] = {}
    for file in checkpoint.weight_files:
        stored |= read_header(file)
    attentions = {name.split(".self_attn.")[0] for name in stored if ".self_attn." in name}
    for layer in sorted(attentions):
        for scale in ("k_scale", "v_scale"):
            name = f"{layer}.self_attn.{scale}"
            if name not in stored:
                yield Finding("error", name, "is missing, though kv_cache_scheme says that the cache is quantized")
            elif not (np.isfinite(load(stored[name])).all() and (load(stored[name]) > 0).all()):
                yield Finding("error", name, "must be finite and above 0")
