"""Lint of quantized layers: what their tensors say against what config.json says of them.

To add a check: a generator of findings, and its line in layer_findings or checkpoint_findings.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ingot.errors import CheckpointError
from ingot.pipeline.checkpoint import Checkpoint
from ingot.pipeline.formats.encoded import EncodedTensor, load
from ingot.pipeline.formats.quantized import QuantizedWeight
from ingot.pipeline.safetensors_file import StoredTensor
from ingot.pipeline.tensors import HEAD

_OTHER_VERSION = {"gptq": "gptq_v2", "gptq_v2": "gptq"}
# Codes less zero points average to 0 in a trained layer, and to -1 or 1 where the zero points are off by one.
_OFF_BY_ONE = 0.5


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong (error) or looks wrong (warning), and the tensor, module or file it is about."""

    severity: Literal["error", "warning"]
    where: str
    message: str


def layer_findings(tensor: EncodedTensor, quantization: Mapping[str, Any]) -> Iterator[Finding]:
    """What one layer's own tensors show; it is decoded once."""
    try:
        weight = tensor.read()
    except CheckpointError as error:
        yield Finding("error", tensor.name, str(error))
        return
    if not isinstance(weight, QuantizedWeight):
        return
    zeros = int(np.count_nonzero(weight.scales == 0))
    if zeros:
        yield Finding("warning", tensor.name, f"{zeros} of {weight.scales.size} scales are 0: their weights are lost")
    if weight.zero_points is not None and quantization.get("quant_method") == "gptq":
        yield from _zero_points(tensor.name, weight, quantization)
    if weight.g_idx is not None and quantization.get("desc_act") is False:
        message = "g_idx puts columns into groups out of order, but desc_act is false: some loaders leave g_idx unread"
        yield Finding("error", tensor.name, message)


def checkpoint_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """What configuration and tensors say of the head, of scales of activations and of the KV cache."""
    if checkpoint.quantization.get("lm_head") is False and HEAD in checkpoint.encoded:
        yield Finding("error", HEAD, "is quantized, but lm_head is false: loaders will look for floats")
    yield from _input_scales(checkpoint)
    yield from _kv_scales(checkpoint)


def _zero_points(name: str, weight: QuantizedWeight, quantization: Mapping[str, Any]) -> Iterator[Finding]:
    assert weight.zero_points is not None
    said = quantization.get("checkpoint_format")
    declared = said or "gptq"
    says = f"checkpoint_format says {declared}" if said else "checkpoint_format is absent, which means gptq"
    middle, points = 1 << (quantization["bits"] - 1), weight.zero_points
    lowest, highest = int(points.min()), int(points.max())
    if quantization.get("sym") and (lowest, highest) in ((middle - 1,) * 2, (middle + 1,) * 2):
        stored = f"its zero points are {lowest}, but sym means {middle}: they are stored as {_OTHER_VERSION[declared]}"
        yield Finding("error", name, f"{stored} stores them, and {says}")
        return
    if quantization.get("sym") and (lowest, highest) != (middle, middle):
        yield Finding("warning", name, f"sym means zero points of {middle}, but they go from {lowest} to {highest}")
    yield from _convention(name, weight, declared, says)
    beyond = int(np.count_nonzero(points >= 2 * middle))
    if beyond:
        yield Finding(
            "warning",
            name,
            f"{beyond} of {points.size} zero points are {2 * middle}, beyond the codes: a zero point of 0, which gptq "
            "cannot store, turns into that",
        )


def _convention(name: str, weight: QuantizedWeight, declared: str, says: str) -> Iterator[Finding]:
    """A guess from the numbers: which side of their zero points the codes lie on."""
    assert weight.zero_points is not None
    per_group = np.bincount(weight.groups_of_columns, minlength=weight.scales.shape[1])
    zeros = float((weight.zero_points.astype(np.float64) * per_group).sum()) / weight.codes.size
    mean = float(weight.codes.mean(dtype=np.float64)) - zeros
    wrong_side = -1 if declared == "gptq" else 1  # read with the wrong version, zero points come out one up, one down
    if abs(mean - wrong_side) < _OFF_BY_ONE:
        yield Finding(
            "warning",
            name,
            f"its codes lie {mean:+.2f} from their zero points on average, as if these were stored as "
            f"{_OTHER_VERSION[declared]} stores them; {says}",
        )


def _input_scales(checkpoint: Checkpoint) -> Iterator[Finding]:
    for tensor in checkpoint.encoded.values():
        name = f"{tensor.name.removesuffix('.weight')}.input_scale"
        static = tensor.activations is not None and not tensor.activations.dynamic
        if static and name not in checkpoint.scales:
            yield Finding("error", name, "is missing, though input_activations are static")
        elif static:
            yield from _positive(checkpoint.scales[name])


def _kv_scales(checkpoint: Checkpoint) -> Iterator[Finding]:
    found = {name: stored for name, stored in checkpoint.scales.items() if name.endswith((".k_scale", ".v_scale"))}
    scheme = checkpoint.quantization.get("kv_cache_scheme")
    if not scheme:
        for name in found:
            yield Finding("warning", name, "is there, but no kv_cache_scheme says that the cache is quantized")
        return
    if isinstance(scheme, Mapping) and scheme.get("dynamic"):
        return
    for layer in sorted({name.split(".self_attn.")[0] for name in checkpoint.shapes if ".self_attn." in name}):
        for part in "kv":
            name = f"{layer}.self_attn.{part}_scale"
            stored = found.get(name) or found.get(f"{layer}.self_attn.{part}_proj.{part}_scale")
            if stored is None:
                yield Finding("error", name, "is missing, though kv_cache_scheme says that the cache is quantized")
            else:
                yield from _positive(stored)


def _positive(stored: StoredTensor) -> Iterator[Finding]:
    values = load(stored)
    if not (np.isfinite(values).all() and (values > 0).all()):
        yield Finding("error", stored.name, f"must be finite and above 0, but it is {values.reshape(-1)[:4].tolist()}")
