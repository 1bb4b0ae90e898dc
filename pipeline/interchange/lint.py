"""Lint a checkpoint, quantized or not: report every error and warning, where a build stops at the first error.

    files, configuration, shapes     errors of reading the checkpoint
    values                           NaN and Inf in tensors and scales, and those of encoded_values.py
    exclude lists                    excluded modules that are quantized, and the other way round
    scales of inputs, KV cache       missing, zero or not finite; present without a scheme

To add a check: a generator of findings, and its line in lint_checkpoint; one of values goes to encoded_values.py.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ingot.artifact.safetensors import StoredTensor
from ingot.errors import CheckpointError
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.checkpoint.config.decoder import read_config
from ingot.pipeline.checkpoint.encoded_values import value_problems
from ingot.pipeline.checkpoint.formats.decoded import DecodedWeight, EncodedTensor, load
from ingot.pipeline.checkpoint.formats.leaves import FLOATS
from ingot.pipeline.checkpoint.formats.quantized_folder import LayerProblems
from ingot.pipeline.checkpoint.tensors import HEAD, check_tensors
from ingot.progress import report_progress

_LAYER = re.compile(r"^model\.layers\.\d+\.(self_attn|mlp)\.\w+$")


@dataclass(frozen=True)
class LintFinding:
    """An error or a warning, and the tensor, module or file that has it."""

    severity: Literal["error", "warning"]
    where: str
    message: str


def lint_checkpoint(path: Path) -> list[LintFinding]:
    """Return all findings in the order of the checks; every tensor is read once, one in memory at a time."""
    try:
        checkpoint = Checkpoint.open(path)
    except LayerProblems as error:
        return [LintFinding("error", module, _without(path, problem)) for module, problem in error.problems.items()]
    except CheckpointError as error:
        return [LintFinding("error", path.name, _without(path, str(error)))]
    findings = [*_structure(checkpoint), *_plain_values(checkpoint)]
    for done, tensor in enumerate(checkpoint.encoded.values(), start=1):
        findings += _layer(tensor, checkpoint.quantization)
        report_progress("decoding", done, len(checkpoint.encoded))
    return [
        *findings,
        *_exclude_lists(checkpoint, checkpoint.quantization),
        *_quantized_head(checkpoint),
        *_input_scales(checkpoint),
        *_kv_scales(checkpoint),
    ]


def _without(path: Path, message: str) -> str:
    """Return the message without the checkpoint's own path, which the finding's place says."""
    return message.removeprefix(f"{path}: ").replace(f"{path}/", "")


def _structure(checkpoint: Checkpoint) -> Iterator[LintFinding]:
    try:
        check_tensors(checkpoint, read_config(checkpoint))
    except CheckpointError as error:
        yield LintFinding("error", checkpoint.path.name, _without(checkpoint.path, str(error)))


def _plain_values(checkpoint: Checkpoint) -> Iterator[LintFinding]:
    try:
        checkpoint.check_finite()
    except CheckpointError as error:
        yield LintFinding("error", checkpoint.path.name, _without(checkpoint.path, str(error)))


def _layer(tensor: EncodedTensor, quantization: Mapping[str, Any]) -> Iterator[LintFinding]:
    """Check one layer's tensors, which are decoded once."""
    try:
        weight = tensor.read()
    except CheckpointError as error:
        yield LintFinding("error", tensor.name, _without(tensor.file.parent, str(error)))
        return
    if not isinstance(weight, DecodedWeight):
        return
    for problem in value_problems(weight, quantization):
        yield LintFinding(problem.severity, tensor.name, problem.message)


def _exclude_lists(checkpoint: Checkpoint, quantization: Mapping[str, Any]) -> Iterator[LintFinding]:
    """Compare the configuration's exclude lists with the layers that are in floats."""
    if not quantization:
        return
    listed = [str(item) for key in ("ignore", "modules_to_not_convert") for item in quantization.get(key) or ()]
    quantized = {name.removesuffix(".weight") for name in checkpoint.encoded}
    modules = quantized | {name.removesuffix(".weight") for name in checkpoint.tensors if name.endswith(".weight")}
    modules.add(HEAD.removesuffix(".weight"))  # loaders have this module even if it shares the embedding's tensor
    for item in listed:
        found = [module for module in modules if _matches(item, module)]
        if not found:
            yield LintFinding("warning", item, "is excluded from quantization, but there is no such module")
        for module in sorted(quantized.intersection(found)):
            yield LintFinding("error", module, f"is excluded from quantization ({item}), but it is quantized")
    for module in sorted(modules - quantized):
        expected = _LAYER.match(module) and not module.endswith("norm")
        head = f"{module}.weight" == HEAD and _targets_all_linear(quantization)
        if (expected or head) and not any(_matches(item, module) for item in listed):
            message = "is in floats, but nothing excludes it from quantization: Ingot reads it, other loaders may not"
            yield LintFinding("warning", module, message)


def _targets_all_linear(quantization: Mapping[str, Any]) -> bool:
    """Return whether a config group targets every Linear, the head too."""
    groups = quantization.get("config_groups") or {}
    return any("Linear" in (group.get("targets") or ()) for group in groups.values() if isinstance(group, Mapping))


def _matches(item: str, module: str) -> bool:
    if item.startswith("re:"):
        return re.match(item.removeprefix("re:"), module) is not None
    return module == item or item in module.split(".") or module.endswith(f".{item}")


def _quantized_head(checkpoint: Checkpoint) -> Iterator[LintFinding]:
    if checkpoint.quantization.get("lm_head") is False and HEAD in checkpoint.encoded:
        message = "is quantized, but lm_head is false: Ingot reads it, other loaders may look for floats"
        yield LintFinding("warning", HEAD, message)


def _input_scales(checkpoint: Checkpoint) -> Iterator[LintFinding]:
    for tensor in checkpoint.encoded.values():
        name = f"{tensor.name.removesuffix('.weight')}.input_scale"
        static = tensor.activations is not None and not tensor.activations.dynamic
        if static and name not in checkpoint.scales:
            yield LintFinding("error", name, "is missing, though input_activations are static")
        elif static:
            yield from _positive(checkpoint.scales[name])


def _kv_scales(checkpoint: Checkpoint) -> Iterator[LintFinding]:
    found = {name: stored for name, stored in checkpoint.scales.items() if name.endswith((".k_scale", ".v_scale"))}
    scheme = checkpoint.quantization.get("kv_cache_scheme")
    if not scheme:
        for name in found:
            yield LintFinding("warning", name, "exists, but no kv_cache_scheme says that the cache is quantized")
        return
    if isinstance(scheme, Mapping) and scheme.get("dynamic"):
        return
    for layer in sorted({name.split(".self_attn.")[0] for name in checkpoint.shapes if ".self_attn." in name}):
        for part in "kv":
            name = f"{layer}.self_attn.{part}_scale"
            stored = found.get(name) or found.get(f"{layer}.self_attn.{part}_proj.{part}_scale")
            if stored is None:
                yield LintFinding("error", name, "is missing, though kv_cache_scheme says that the cache is quantized")
            else:
                yield from _positive(stored)


def _positive(stored: StoredTensor) -> Iterator[LintFinding]:
    if stored.dtype not in FLOATS:
        yield LintFinding("error", stored.name, f"is {stored.dtype}; a scale must be {' or '.join(FLOATS)}")
        return
    values = load(stored)
    if not (np.isfinite(values).all() and (values > 0).all()):
        yield LintFinding(
            "error", stored.name, f"must be finite and above 0, but it is {values.reshape(-1)[:4].tolist()}"
        )
