"""Methods that decode a checkpoint's layers; quant_methods.py reads which one a quantization_config asks for.

A method says which leaves of a module make a quantized layer, the layer's shape, and how they decode.

quantization_config -> the method that decodes a checkpoint's layers. To add one: a class and a line here.

Whatever a configuration says that would change the result and is not understood is refused by its key.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from ingot.artifact.safetensors import StoredTensor
from ingot.errors import ConfigError, did_you_mean, one_of
from ingot.pipeline.checkpoint.formats import awq, compressed_tensors, gptq, modelopt
from ingot.pipeline.checkpoint.formats.activations import ActivationScheme, activations_of_config
from ingot.pipeline.checkpoint.formats.codes import WORD_BITS
from ingot.pipeline.checkpoint.formats.decoded import DecodedWeight, FloatArray, load

Arrays = Mapping[str, NDArray[Any]]
Stored = Mapping[str, StoredTensor]


class Method(Protocol):
    """How the layers of one checkpoint are decoded."""

    def owns(self, leaves: Collection[str]) -> bool:
        """Whether a module with these leaves is a quantized layer."""

    def reads(self, leaves: Stored) -> Stored:
        """Those of the leaves that the weight is decoded from. ConfigError when one is missing."""

    def shape(self, leaves: Stored) -> tuple[int, int]:
        """[out, in] of the layer."""

    def decode(self, module: str, arrays: Arrays) -> DecodedWeight | FloatArray:
        """The layer's weight; ValueError when the tensors contradict one another."""

    def says(self, module: str) -> tuple[str, ActivationScheme | None]:
        """The storage format of a layer, where the method has several, and how its inputs are quantized."""


IGNORED_LEAVES = frozenset({"input_scale", "input_zero_point", "k_scale", "v_scale", "q_scale", "output_scale"})


@dataclass(frozen=True)
class Gptq:
    """quant_method gptq. version: 1 stores zero points minus one, 2 as they are."""

    bits: int
    group_size: int
    version: int
    act_order: bool

    def owns(self, leaves: Collection[str]) -> bool:
        return "qweight" in leaves

    def reads(self, leaves: Stored) -> Stored:
        if self.act_order and "g_idx" not in leaves:
            raise ConfigError("desc_act is true but there is no g_idx, so the columns' groups are unknown")
        return _pick(leaves, ("qweight", "qzeros", "scales"), ("g_idx",))

    def shape(self, leaves: Stored) -> tuple[int, int]:
        words, rows = leaves["qweight"].shape
        return rows, words * WORD_BITS // self.bits

    def decode(self, module: str, arrays: Arrays) -> DecodedWeight:
        parts = arrays["qweight"], arrays["qzeros"], arrays["scales"], arrays.get("g_idx")
        return gptq.decode(*parts, bits=self.bits, group_size=self.group_size, version=self.version)

    def says(self, module: str) -> tuple[str, ActivationScheme | None]:
        return "", None


@dataclass(frozen=True)
class Awq:
    """quant_method awq, gemm layout."""

    group_size: int

    def owns(self, leaves: Collection[str]) -> bool:
        return "qweight" in leaves

    def reads(self, leaves: Stored) -> Stored:
        return _pick(leaves, ("qweight", "qzeros", "scales"))

    def shape(self, leaves: Stored) -> tuple[int, int]:
        columns, words = leaves["qweight"].shape
        return words * len(awq.ORDER), columns

    def decode(self, module: str, arrays: Arrays) -> DecodedWeight:
        return awq.decode(arrays["qweight"], arrays["qzeros"], arrays["scales"], group_size=self.group_size)

    def says(self, module: str) -> tuple[str, ActivationScheme | None]:
        return "", None


@dataclass(frozen=True)
class LayerScheme:
    """One config group of compressed-tensors."""

    targets: tuple[str, ...]
    storage: str
    bits: int
    group_size: int | None
    block: tuple[int, int] | None
    activations: ActivationScheme | None

    def covers(self, module: str) -> bool:
        """By class name (all layers here are Linear), by regular expression, or by the module's name."""
        return any(
            re.match(target.removeprefix("re:"), module) if target.startswith("re:") else target in ("Linear", module)
            for target in self.targets
        )


@dataclass(frozen=True)
class CompressedTensors:
    """quant_method compressed-tensors: schemes by target, named ones before those for all Linear layers."""

    schemes: tuple[LayerScheme, ...]

    def owns(self, leaves: Collection[str]) -> bool:
        return "weight_packed" in leaves or "weight_scale" in leaves

    def reads(self, leaves: Stored) -> Stored:
        body = "weight_packed" if "weight_packed" in leaves else "weight"
        optional = ("weight_zero_point", "weight_g_idx", "weight_global_scale", "weight_shape")
        return _pick(leaves, (body, "weight_scale"), optional)

    def shape(self, leaves: Stored) -> tuple[int, int]:
        if "weight_shape" in leaves:
            rows, columns = (int(size) for size in load(leaves["weight_shape"]))
            return rows, columns
        packed = "weight_packed" in leaves
        rows, columns = leaves["weight_packed" if packed else "weight"].shape
        return rows, columns * 2 if packed else columns

    def decode(self, module: str, arrays: Arrays) -> DecodedWeight:
        scheme = self._scheme(module)
        _require(arrays, scheme.storage)
        return compressed_tensors.decode(
            arrays, scheme.storage, bits=scheme.bits, group_size=scheme.group_size, block=scheme.block
        )

    def says(self, module: str) -> tuple[str, ActivationScheme | None]:
        scheme = self._scheme(module)
        return scheme.storage, scheme.activations

    def _scheme(self, module: str) -> LayerScheme:
        scheme = next((scheme for scheme in self.schemes if scheme.covers(module)), None)
        if scheme is None:
            raise ValueError("is quantized, but no config group targets it")
        return scheme


@dataclass(frozen=True)
class ModelOpt:
    """quant_method modelopt, one quant_algo for all layers."""

    algorithm: str

    def owns(self, leaves: Collection[str]) -> bool:
        return "weight_scale" in leaves

    def reads(self, leaves: Stored) -> Stored:
        return _pick(leaves, ("weight", "weight_scale"), ("weight_scale_2", "pre_quant_scale"))

    def shape(self, leaves: Stored) -> tuple[int, int]:
        rows, columns = leaves["weight"].shape
        return modelopt.shape((rows, columns), self.algorithm)

    def decode(self, module: str, arrays: Arrays) -> DecodedWeight | FloatArray:
        return modelopt.decode(arrays, self.algorithm)

    def says(self, module: str) -> tuple[str, ActivationScheme | None]:
        return "", modelopt.activations(self.algorithm)


def _pick(leaves: Stored, needed: tuple[str, ...], optional: tuple[str, ...] = ()) -> Stored:
    for leaf in needed:
        if leaf not in leaves:
            raise ConfigError(f"has no {leaf!r}; it holds {one_of(leaves)}")
    return {leaf: leaves[leaf] for leaf in (*needed, *optional) if leaf in leaves}


def _require(arrays: Arrays, storage: str) -> None:
    needed = {"pack-quantized": "weight_shape", "nvfp4-pack-quantized": "weight_global_scale"}.get(storage)
    body = "weight_packed" if "pack" in storage else "weight"
    for leaf in (body, needed or body):
        if leaf not in arrays:
            raise ValueError(f"has no {leaf!r}, which {storage} needs")


def read_method(config: Mapping[str, Any], place: str) -> Method:
    """The method that a quantization_config asks for. ConfigError names what is not supported and what is."""
    name = config.get("quant_method") or config.get("method")
    if name not in METHODS:
        near = did_you_mean(str(name), METHODS)
        raise ConfigError(f"{place}: quant_method is {name!r}; Ingot reads {one_of(METHODS)} and GGUF files.{near}")
    return METHODS[name](_Keys(config, place))


@dataclass(frozen=True)
class _Keys:
    """The configuration's keys, with messages that name them."""

    config: Mapping[str, Any]
    place: str

    def choice(self, key: str, allowed: Collection[Any], default: Any = None) -> Any:
        value = self.config.get(key, default)
        if value not in allowed or isinstance(value, bool) is not all(isinstance(item, bool) for item in allowed):
            raise ConfigError(f"{self.place}: {key} is {value!r}; it must be {' or '.join(map(repr, allowed))}")
        return value

    def group_size(self) -> int:
        value = self.config.get("group_size")
        if type(value) is not int or (value < 1 and value != -1):
            raise ConfigError(
                f"{self.place}: group_size is {value!r}; it must be a number from 1, or -1 for whole rows"
            )
        return value

    def refuse(self, key: str, why: str) -> None:
        if self.config.get(key):
            raise ConfigError(f"{self.place}: {key} is {self.config[key]!r}; {why}")


def _gptq(keys: _Keys) -> Method:
    keys.refuse("is_marlin_format", "weights reordered for the Marlin kernel are not read: take the plain checkpoint")
    keys.refuse("dynamic", "settings per layer are not read")
    keys.choice("pack_dtype", ("int32",), "int32")
    layout = keys.config.get("checkpoint_format") or keys.config.get("format") or "gptq"
    if layout not in ("gptq", "gptq_v2"):
        raise ConfigError(f"{keys.place}: checkpoint_format is {layout!r}; Ingot reads 'gptq' and 'gptq_v2'")
    return Gptq(
        bits=keys.choice("bits", gptq.BITS),
        group_size=keys.group_size(),
        version=2 if layout == "gptq_v2" else 1,
        act_order=bool(keys.choice("desc_act", (True, False), False)),
    )


def _awq(keys: _Keys) -> Method:
    version = str(keys.config.get("version", "gemm")).lower()
    if version != "gemm":
        raise ConfigError(f"{keys.place}: version is {version!r}, another layout of AWQ; Ingot reads 'gemm'")
    keys.choice("bits", (awq.BITS,))
    keys.choice("zero_point", (True,), True)
    return Awq(keys.group_size())


def _compressed(keys: _Keys) -> Method:
    keys.refuse("transform_config", "transforms that run with the model are not supported")
    sparsity = keys.config.get("sparsity_config") or {}
    if sparsity.get("format", "dense") != "dense":
        raise ConfigError(f"{keys.place}: sparsity_config has the format {sparsity['format']!r}; Ingot reads 'dense'")
    groups = keys.config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ConfigError(f"{keys.place}: config_groups must be an object with a group at least")
    schemes = [_scheme(keys, name, group) for name, group in groups.items()]
    return CompressedTensors(tuple(sorted(schemes, key=lambda scheme: "Linear" in scheme.targets)))


def _scheme(keys: _Keys, name: str, group: Any) -> LayerScheme:
    place = f"{keys.place}: config_groups.{name}"
    weights = group.get("weights") if isinstance(group, dict) else None
    targets = group.get("targets") if isinstance(group, dict) else None
    bits = weights.get("num_bits") if isinstance(weights, dict) else None
    if not isinstance(weights, dict) or not isinstance(targets, list) or type(bits) is not int:
        raise ConfigError(f"{place}: must hold targets and weights with num_bits")
    storage = group.get("format") or keys.config.get("format")
    if storage not in compressed_tensors.FORMATS:
        raise ConfigError(f"{place}: format is {storage!r}; Ingot reads {one_of(compressed_tensors.FORMATS)}")
    if storage == "pack-quantized" and bits not in compressed_tensors.PACKED_BITS:
        raise ConfigError(f"{place}: num_bits is {bits}; pack-quantized is read with 2 to 8 bits")
    if storage in ("int-quantized", "float-quantized", "naive-quantized") and bits != 8:
        raise ConfigError(f"{place}: num_bits is {bits}; {storage} is read with 8 bits")
    block = _block(place, weights) if weights.get("strategy") == "block" else None
    group_size = weights.get("group_size") if weights.get("strategy") == "group" else None
    try:
        activations = activations_of_config(group.get("input_activations"))
    except ValueError as error:
        raise ConfigError(f"{place}: {error}") from error
    return LayerScheme(tuple(map(str, targets)), storage, bits, group_size, block, activations)


def _block(place: str, weights: Mapping[str, Any]) -> tuple[int, int]:
    match weights.get("block_structure"):
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
        case found:
            raise ConfigError(f"{place}: block_structure is {found!r}; it must be [rows, columns]")


def _modelopt(keys: _Keys) -> Method:
    algorithm = keys.config.get("quant_algo")
    if algorithm not in modelopt.ALGORITHMS:
        near = did_you_mean(str(algorithm), modelopt.ALGORITHMS)
        raise ConfigError(
            f"{keys.place}: quant_algo is {algorithm!r}; Ingot reads {one_of(modelopt.ALGORITHMS)} of ModelOpt.{near}"
        )
    return ModelOpt(algorithm)


METHODS: dict[str, Callable[[_Keys], Method]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed,
    "modelopt": _modelopt,
}
