"""Methods that decode a checkpoint's layers; method_config.py reads which one a quantization_config asks for.

A method says which leaves of a module make a quantized layer, the layer's shape, and how they decode.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from ingot.errors import ConfigError, one_of
from ingot.pipeline.formats import awq, compressed_tensors, gptq, modelopt
from ingot.pipeline.formats.activations import ActivationScheme
from ingot.pipeline.formats.bits import WORD_BITS
from ingot.pipeline.formats.encoded import load
from ingot.pipeline.formats.quantized import FloatArray, QuantizedWeight
from ingot.pipeline.safetensors_file import StoredTensor

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

    def decode(self, module: str, arrays: Arrays) -> QuantizedWeight | FloatArray:
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

    def decode(self, module: str, arrays: Arrays) -> QuantizedWeight:
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

    def decode(self, module: str, arrays: Arrays) -> QuantizedWeight:
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

    def decode(self, module: str, arrays: Arrays) -> QuantizedWeight:
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

    def decode(self, module: str, arrays: Arrays) -> QuantizedWeight | FloatArray:
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
