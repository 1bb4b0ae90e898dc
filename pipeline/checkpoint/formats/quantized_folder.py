"""A folder of quantized safetensors: its plain tensors, and its quantized layers under the names of their weights."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ingot.artifact.safetensors import StoredTensor
from ingot.errors import CheckpointError, ConfigError
from ingot.pipeline.checkpoint.formats.decoded import DecodedWeight, EncodedTensor, FloatArray, load
from ingot.pipeline.checkpoint.formats.quant_methods import IGNORED_LEAVES, Method, Stored, read_method
from ingot.pipeline.checkpoint.json_files import read_json_object

KEYS = ("quantization_config", "compression_config")
SIDE_FILE = "quantize_config.json"  # GPTQ
MODELOPT_FILE = "hf_quant_config.json"
SIDE_FILES = (SIDE_FILE, MODELOPT_FILE)
_KV_CACHE = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}


def quantization_of(folder: Path, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What config.json, or one of SIDE_FILES beside it, says of quantization; None when nothing does.

    ConfigError when both speak and contradict each other.
    """
    inside = next((config[key] for key in KEYS if config.get(key) is not None), None)
    if inside is None and (folder / MODELOPT_FILE).is_file():
        inside = {"quant_method": "modelopt", **read_json_object(folder / MODELOPT_FILE).get("quantization", {})}
    if inside is not None and inside.get("quant_method") == "modelopt":
        return _of_modelopt(inside)
    file = folder / SIDE_FILE
    if not file.is_file():
        return inside
    beside = read_json_object(file)
    for key in ("bits", "group_size", "desc_act", "checkpoint_format"):
        if inside and key in inside and key in beside and inside[key] != beside[key]:
            raise ConfigError(
                f"{file}: {key} is {beside[key]!r}, but config.json says {inside[key]!r}; remove the one that is wrong"
            )
    return {"quant_method": "gptq", **beside, **(inside or {})}


def _of_modelopt(values: Mapping[str, Any]) -> dict[str, Any]:
    """With the keys that compressed-tensors has for the same: ignore, kv_cache_scheme."""
    found = dict(values)
    if values.get("kv_cache_quant_algo") == "FP8":
        found["kv_cache_scheme"] = _KV_CACHE
    if "exclude_modules" in values:
        found["ignore"] = list(values["exclude_modules"] or ())
    return found


def split_tensors(
    tensors: Mapping[str, StoredTensor], quantization: Mapping[str, Any], place: str
) -> tuple[dict[str, StoredTensor], dict[str, EncodedTensor]]:
    """Plain tensors, and quantized weights by the name `<module>.weight`.

    Scales of activations and of the KV cache are left out: Ingot computes both in the engine's own precision. Raises
    CheckpointError naming a module that lacks a tensor, or a checkpoint without a quantized layer.
    """
    method = read_method(quantization, place)
    plain: dict[str, StoredTensor] = {}
    encoded: dict[str, EncodedTensor] = {}
    for module, leaves in _modules(tensors).items():
        kept = {leaf: stored for leaf, stored in leaves.items() if leaf not in IGNORED_LEAVES}
        if method.owns(kept):
            tensor, used = _layer(method, module, kept)
            encoded[tensor.name] = tensor
            kept = {leaf: stored for leaf, stored in kept.items() if leaf not in used}
        plain.update({stored.name: stored for stored in kept.values()})
    if not encoded:
        raise CheckpointError(f"{place}: announces a quantized checkpoint, but no layer is; config and weights differ")
    return plain, encoded


def _modules(tensors: Mapping[str, StoredTensor]) -> dict[str, dict[str, StoredTensor]]:
    found: dict[str, dict[str, StoredTensor]] = {}
    for name, stored in tensors.items():
        module, _, leaf = name.rpartition(".")
        found.setdefault(module, {})[leaf] = stored
    return found


def _layer(method: Method, module: str, leaves: Stored) -> tuple[EncodedTensor, Stored]:
    file = next(iter(leaves.values())).file
    try:
        used = method.reads(leaves)
        shape = method.shape(used)
        storage, activations = method.says(module)
    except (ConfigError, ValueError) as error:
        raise CheckpointError(f"{file}: the quantized layer {module!r}: {error}") from error
    decode = partial(_decode, method, module, used)
    return EncodedTensor(f"{module}.weight", shape, file, decode, used, storage, activations), used


def scales_left_out(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Scales of activations and of the KV cache, which belong to no weight."""
    return {name: stored for name, stored in tensors.items() if name.rpartition(".")[2] in IGNORED_LEAVES}


def _decode(method: Method, module: str, leaves: Stored) -> DecodedWeight | FloatArray:
    return method.decode(module, {leaf: load(stored) for leaf, stored in leaves.items()})
