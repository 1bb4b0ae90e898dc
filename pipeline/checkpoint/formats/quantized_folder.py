"""A folder of quantized safetensors: its plain tensors, and its quantized layers under the names of their weights."""

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ingot.artifact.json_text import read_json_object
from ingot.artifact.safetensors import StoredTensor
from ingot.errors import CheckpointError, ConfigError, did_you_mean, one_of, shown
from ingot.pipeline.checkpoint.formats import mxfp4
from ingot.pipeline.checkpoint.formats.awq import AwqMethod
from ingot.pipeline.checkpoint.formats.bitsandbytes import BitsAndBytes
from ingot.pipeline.checkpoint.formats.codes import FloatArray
from ingot.pipeline.checkpoint.formats.compressed_tensors import CompressedTensors
from ingot.pipeline.checkpoint.formats.decoded import DecodedWeight, EncodedTensor, load
from ingot.pipeline.checkpoint.formats.gptq import GptqMethod
from ingot.pipeline.checkpoint.formats.leaves import PLAIN, QUANTIZED_LEAVES, Stored
from ingot.pipeline.checkpoint.formats.modelopt import ModelOpt
from ingot.pipeline.checkpoint.formats.quant_method import QuantMethod
from ingot.pipeline.checkpoint.formats.scaled_codes import BitNetMethod, FbgemmFp8Method, Fp8Method

METHODS: Mapping[str, type[QuantMethod]] = {
    "gptq": GptqMethod,
    "awq": AwqMethod,
    "compressed-tensors": CompressedTensors,
    "modelopt": ModelOpt,
    "fp8": Fp8Method,
    "fbgemm_fp8": FbgemmFp8Method,
    "bitsandbytes": BitsAndBytes,
    "bitnet": BitNetMethod,
}
OTHER_METHODS = frozenset(
    {"aqlm", "autoround", "bitblas", "deepspeedfp", "eetq", "exl2", "exl3", "experts_int8"}
    | {"fouroversix", "fp_quant", "gemma", "gguf", "gptq_bitblas", "gptq_marlin", "gptq_marlin_24", "higgs", "hqq"}
    | {"humming", "inc", "ipex", "marlin", "metal", "moe_wna16", "mxfp8", "neuron_quant", "nvfp4", "petit_nvfp4"}
    | {"ptpc_fp8", "qqq", "quanto", "quark", "rtn", "sinq", "spqr", "torchao", "tpu_int8", "vptq", "woq"}
)
"""Methods of other packages that are not read: a name of these is not a misspelling."""
KEYS = ("quantization_config", "compression_config")
SIDE_FILE = "quantize_config.json"  # GPTQ
MODELOPT_FILE = "hf_quant_config.json"
NAME_LISTS = ("ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules", "llm_int8_skip_modules")
SIDE_FILES = (SIDE_FILE, MODELOPT_FILE)
IGNORED_LEAVES = frozenset(
    {"input_scale", "input_zero_point", "input_global_scale", "k_scale", "v_scale", "q_scale", "output_scale"}
    | {"activation_scale"}
)
# AutoRound stores layers in the layouts of other packages, which packing_format names.
_AUTO_ROUND = ("auto-round", "intel/auto-round")
_AUTO_ROUND_LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "auto_round:auto_gptq": {"quant_method": "gptq", "checkpoint_format": "gptq"},
    "auto_round:auto_awq": {"quant_method": "awq", "version": "gemm", "zero_point": True},
}
_PLAIN_BITS = 16
_KV_CACHE = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}


def quantization_of(folder: Path, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the quantization_config of config.json or of a side file; None when the folder is not quantized.

    ConfigError when it is not an object, or when both files have one and they contradict each other.
    """
    key = next((key for key in KEYS if config.get(key) is not None), None)
    own = None if key is None else _object(folder / "config.json", key, config[key])
    if own is None and (folder / MODELOPT_FILE).is_file():
        file = folder / MODELOPT_FILE
        described = _object(file, "quantization", read_json_object(file).get("quantization", {}))
        own = {"quant_method": "modelopt", **described}
    if own is not None and own.get("quant_method") == "modelopt":
        return _in_names_of_compressed_tensors(own)
    if own is not None and own.get("quant_method") in _AUTO_ROUND:
        return _in_names_of_its_layout(own, f"{folder / 'config.json'}: {key}")
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


def _object(file: Path, key: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{file}: {key} is {shown(value)}; it must be an object that says how weights are stored")
    _check_names(file, key, value)
    return value


def _check_names(file: Path, key: str, quantization: Mapping[str, Any]) -> None:
    """Raise ConfigError unless the lists of modules in floats are lists of names."""
    for list_key in NAME_LISTS:
        names = quantization.get(list_key)
        if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
            raise ConfigError(f"{file}: {key}.{list_key} is {shown(names)}; it must be a list of names of modules")


def _in_names_of_compressed_tensors(modelopt: Mapping[str, Any]) -> dict[str, Any]:
    """Add the keys `ignore` and `kv_cache_scheme`, which ModelOpt names differently."""
    found = dict(modelopt)
    if modelopt.get("kv_cache_quant_algo") == "FP8":
        found["kv_cache_scheme"] = _KV_CACHE
    if "exclude_modules" in modelopt:
        found["ignore"] = list(modelopt["exclude_modules"] or ())
    return found


def _in_names_of_its_layout(auto_round: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return the settings of AutoRound as those of the package in whose layout the layers are stored."""
    packing = auto_round.get("packing_format")
    layout = _AUTO_ROUND_LAYOUTS.get(str(packing))
    if layout is None:
        raise ConfigError(
            f"{place}.packing_format is {shown(packing)}; of auto-round Ingot reads {one_of(_AUTO_ROUND_LAYOUTS)}: "
            'save the model again with format="auto_round:auto_gptq"'
        )
    if auto_round.get("data_type", "int") != "int":
        raise ConfigError(f"{place}.data_type is {shown(auto_round['data_type'])}; of auto-round Ingot reads 'int'")
    own = {key: auto_round.get(key) for key in ("bits", "group_size")}
    for layer, settings in (auto_round.get("extra_config") or {}).items():
        changed = {**own, **{key: value for key, value in settings.items() if key in own}}
        if changed != own and changed["bits"] < _PLAIN_BITS:
            raise ConfigError(
                f"{place}.extra_config gives {shown(layer)} {changed['bits']} bits in groups of "
                f"{changed['group_size']}; Ingot reads auto-round with one scheme for all quantized layers"
            )
    return {**auto_round, **layout}


def split_tensors(
    tensors: Mapping[str, StoredTensor], quantization: Mapping[str, Any], place: str
) -> tuple[dict[str, StoredTensor], dict[str, EncodedTensor]]:
    """Return plain tensors, and quantized weights by the name `<module>.weight`.

    Scales of activations and of the KV cache are left out: Ingot computes both in the engine's own precision. Raises
    CheckpointError for a module that lacks a tensor, and for a checkpoint without a quantized layer.
    """
    if quantization.get("quant_method") == mxfp4.METHOD:
        return mxfp4.split_mxfp4(tensors, place)
    method = _read_method(quantization, place)
    plain: dict[str, StoredTensor] = {}
    encoded: dict[str, EncodedTensor] = {}
    problems: dict[str, str] = {}
    for module, leaves in _modules(tensors).items():
        kept = {leaf: stored for leaf, stored in leaves.items() if leaf not in IGNORED_LEAVES}
        if _is_quantized(kept):
            try:
                tensor = _layer(method, module, kept)
            except (ConfigError, ValueError) as error:
                problems[module] = f"{next(iter(kept.values())).file}: the quantized layer {shown(module)}: {error}"
                continue
            encoded[tensor.name] = tensor
            kept = {leaf: stored for leaf, stored in kept.items() if leaf not in tensor.parts}
        plain.update({stored.name: stored for stored in kept.values()})
    if problems:
        raise LayerProblems(problems)
    if not encoded:
        raise CheckpointError(f"{place}: announces a quantized checkpoint, but no layer is; config and weights differ")
    return plain, encoded


def _is_quantized(leaves: Stored) -> bool:
    """Whether these are the tensors of a quantized layer, or what is left of one: codes without their scales."""
    codes = "weight" in leaves and leaves["weight"].dtype not in PLAIN
    return codes or bool(QUANTIZED_LEAVES.intersection(leaves))


class LayerProblems(CheckpointError):
    """Quantized layers whose tensors are missing, of a wrong type or shape, or too many; `problems` by module."""

    def __init__(self, problems: Mapping[str, str]) -> None:
        self.problems = dict(problems)
        first, *others = self.problems.values()
        more = f"; {len(others)} more layers have problems (ingot lint-checkpoint lists them)" if others else ""
        super().__init__(first + more)


def refuse_quantized_tensors(tensors: Mapping[str, StoredTensor], place: str) -> None:
    """Raise CheckpointError when tensors are stored as a quantized layer's and no description says how."""
    for name, stored in tensors.items():
        if name.rpartition(".")[2] in QUANTIZED_LEAVES - {"scales"}:  # a parameter of other models too
            raise CheckpointError(
                f"{stored.file}: {shown(name)} belongs to a quantized layer, but {place} has no quantization_config "
                "that says how it is stored; copy the checkpoint's config.json again"
            )


def scales_left_out(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the scales of activations and of the KV cache, which belong to no weight, by compressed-tensors' names."""
    found = {name: stored for name, stored in tensors.items() if name.rpartition(".")[2] in IGNORED_LEAVES}
    return {re.sub(r"\.activation_scale$", ".input_scale", name): stored for name, stored in found.items()}


def _read_method(config: Mapping[str, Any], place: str) -> QuantMethod:
    name = str(config.get("quant_method") or config.get("method"))
    if name not in METHODS:
        known = [*METHODS, mxfp4.METHOD, _AUTO_ROUND[0]]
        near = "" if name in OTHER_METHODS else did_you_mean(name, known)
        raise ConfigError(
            f"{place}: quant_method is {shown(name)}, which Ingot does not read.{near} Ingot reads GGUF files and "
            f"{one_of(known)}: build from the model that was quantized, which Ingot quantizes itself, or let the "
            "package that wrote this one save its weights as floats"
        )
    return METHODS[name].read(config, place)


def _modules(tensors: Mapping[str, StoredTensor]) -> dict[str, dict[str, StoredTensor]]:
    found: dict[str, dict[str, StoredTensor]] = {}
    for name, stored in tensors.items():
        # bitsandbytes has tensors below a layer's weight.
        module, between, leaf = name.partition(".weight.")
        if not between:
            module, _, leaf = name.rpartition(".")
        found.setdefault(module, {})[leaf] = stored
    return found


def _layer(method: QuantMethod, module: str, leaves: Stored) -> EncodedTensor:
    parts, shape = method.read_leaves(module, leaves)
    file = next(iter(leaves.values())).file
    decode = partial(_decode, method, module, parts)
    storage, activations = method.storage_of(module), method.activations_of(module)
    return EncodedTensor(f"{module}.weight", shape, file, decode, parts, storage, activations)


def _decode(method: QuantMethod, module: str, leaves: Stored) -> DecodedWeight | FloatArray:
    return method.decode(module, {leaf: load(stored) for leaf, stored in leaves.items()})
