"""A folder of quantized safetensors: its plain tensors, and its quantized layers under the names of their weights."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ingot.artifact.safetensors import StoredTensor
from ingot.errors import CheckpointError, ConfigError, near_or_all, shown
from ingot.pipeline.checkpoint.formats.awq import Awq
from ingot.pipeline.checkpoint.formats.codes import FloatArray
from ingot.pipeline.checkpoint.formats.compressed_tensors import CompressedTensors
from ingot.pipeline.checkpoint.formats.decoded import DecodedWeight, EncodedTensor, load
from ingot.pipeline.checkpoint.formats.gptq import Gptq
from ingot.pipeline.checkpoint.formats.modelopt import ModelOpt
from ingot.pipeline.checkpoint.formats.quant_method import QuantMethod, Stored
from ingot.pipeline.checkpoint.json_files import read_json_object

METHODS: Mapping[str, type[QuantMethod]] = {
    "gptq": Gptq,
    "awq": Awq,
    "compressed-tensors": CompressedTensors,
    "modelopt": ModelOpt,
}
KEYS = ("quantization_config", "compression_config")
SIDE_FILE = "quantize_config.json"  # GPTQ
MODELOPT_FILE = "hf_quant_config.json"
SIDE_FILES = (SIDE_FILE, MODELOPT_FILE)
IGNORED_LEAVES = frozenset({"input_scale", "input_zero_point", "k_scale", "v_scale", "q_scale", "output_scale"})
_KV_CACHE = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}


def quantization_of(folder: Path, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the quantization_config of config.json or of a side file; None when the folder is not quantized.

    ConfigError when both files have one and they contradict each other.
    """
    own = next((config[key] for key in KEYS if config.get(key) is not None), None)
    if own is None and (folder / MODELOPT_FILE).is_file():
        own = {"quant_method": "modelopt", **read_json_object(folder / MODELOPT_FILE).get("quantization", {})}
    if own is not None and own.get("quant_method") == "modelopt":
        return _in_names_of_compressed_tensors(own)
    file = folder / SIDE_FILE
    if not file.is_file():
        return own
    side = read_json_object(file)
    for key in ("bits", "group_size", "desc_act", "checkpoint_format"):
        if own and key in own and key in side and own[key] != side[key]:
            raise ConfigError(
                f"{file}: {key} is {shown(side[key])}, but config.json says {shown(own[key])}; remove the wrong one"
            )
    return {"quant_method": "gptq", **side, **(own or {})}


def _in_names_of_compressed_tensors(modelopt: Mapping[str, Any]) -> dict[str, Any]:
    """Add the keys `ignore` and `kv_cache_scheme`, which ModelOpt names differently."""
    found = dict(modelopt)
    if modelopt.get("kv_cache_quant_algo") == "FP8":
        found["kv_cache_scheme"] = _KV_CACHE
    if "exclude_modules" in modelopt:
        found["ignore"] = list(modelopt["exclude_modules"] or ())
    return found


def split_tensors(
    tensors: Mapping[str, StoredTensor], quantization: Mapping[str, Any], place: str
) -> tuple[dict[str, StoredTensor], dict[str, EncodedTensor]]:
    """Return plain tensors, and quantized weights by the name `<module>.weight`.

    Scales of activations and of the KV cache are left out: Ingot computes both in the engine's own precision. Raises
    CheckpointError for a module that lacks a tensor, and for a checkpoint without a quantized layer.
    """
    method = _read_method(quantization, place)
    plain: dict[str, StoredTensor] = {}
    encoded: dict[str, EncodedTensor] = {}
    for module, leaves in _modules(tensors).items():
        kept = {leaf: stored for leaf, stored in leaves.items() if leaf not in IGNORED_LEAVES}
        if method.owns(kept):
            tensor = _layer(method, module, kept)
            encoded[tensor.name] = tensor
            kept = {leaf: stored for leaf, stored in kept.items() if leaf not in tensor.parts}
        plain.update({stored.name: stored for stored in kept.values()})
    if not encoded:
        raise CheckpointError(f"{place}: announces a quantized checkpoint, but no layer is; config and weights differ")
    return plain, encoded


def scales_left_out(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the scales of activations and of the KV cache, which belong to no weight."""
    return {name: stored for name, stored in tensors.items() if name.rpartition(".")[2] in IGNORED_LEAVES}


def _read_method(config: Mapping[str, Any], place: str) -> QuantMethod:
    name = str(config.get("quant_method") or config.get("method"))
    if name not in METHODS:
        known = near_or_all(name, METHODS, "Ingot reads GGUF files and")
        raise ConfigError(f"{place}: quant_method is {shown(name)}{known}")
    return METHODS[name].read(config, place)


def _modules(tensors: Mapping[str, StoredTensor]) -> dict[str, dict[str, StoredTensor]]:
    found: dict[str, dict[str, StoredTensor]] = {}
    for name, stored in tensors.items():
        module, _, leaf = name.rpartition(".")
        found.setdefault(module, {})[leaf] = stored
    return found


def _layer(method: QuantMethod, module: str, leaves: Stored) -> EncodedTensor:
    file = next(iter(leaves.values())).file
    try:
        parts = method.reads(leaves)
        shape, storage, activations = method.shape(parts), method.storage_of(module), method.activations_of(module)
    except (ConfigError, ValueError) as error:
        raise CheckpointError(f"{file}: the quantized layer {shown(module)}: {error}") from error
    decode = partial(_decode, method, module, parts)
    return EncodedTensor(f"{module}.weight", shape, file, decode, parts, storage, activations)


def _decode(method: QuantMethod, module: str, leaves: Stored) -> DecodedWeight | FloatArray:
    return method.decode(module, {leaf: load(stored) for leaf, stored in leaves.items()})
