"""A LoRA adapter in PEFT's form, merged into a checkpoint's weights each time they are read.

    adapter_config.json          how the matrices are scaled
    adapter_model.safetensors    base_model.model.MODULE.lora_A.weight [rank, in], .lora_B.weight [out, rank], ...

    W' = W + scale B A                             scale = alpha / rank, or alpha / sqrt(rank) with use_rslora
    W' = m (W + scale B A) / |W + scale B A|       DoRA: m [out] is lora_magnitude_vector, norms are of rows

Other tensors of an adapter (modules_to_save, biases) replace the checkpoint's. A sum is computed in float32 and rounded
once to the checkpoint's type. Sources: Hu et al. 2021 (LoRA), Kalajdzievski 2023 (rank-stabilised), Liu et al. 2024
(DoRA); the layout of PEFT 0.21.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.artifact.safetensors import StoredTensor, read_header
from ingot.errors import CheckpointError, did_you_mean, shown
from ingot.passes.weights import apply_to_array
from ingot.pipeline.checkpoint.formats.codes import FloatArray
from ingot.pipeline.checkpoint.formats.decoded import load
from ingot.pipeline.checkpoint.json_files import read_json_object

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
Rename = Callable[[str], str]
_Number = TypeVar("_Number", int, float)

_PREFIX = "base_model.model."
_PARTS = {
    "lora_A.weight": "a",
    "lora_B.weight": "b",
    "lora_magnitude_vector": "magnitude",
    "lora_magnitude_vector.weight": "magnitude",
}
_FLOATS = ("F32", "F16", "BF16")
_OTHER_KINDS = {  # keys of adapter_config.json that change what is computed, and values that change nothing
    "layer_replication": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, []),
    "lora_bias": (None, False),
    "alora_invocation_tokens": (None,),
    "use_qalora": (None, False),
    "arrow_config": (None,),
    "use_bdlora": (None, False),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "velora_config": (None,),
    "init_lora_weights": (None, True, False, "gaussian", "orthogonal", "eva"),  # others change the checkpoint too
}


@dataclass(frozen=True)
class LowRank:
    """The low-rank change of a weight [out, in].

    transposed   the checkpoint stores it as [in, out] (Conv1D of gpt2)
    """

    a: StoredTensor
    b: StoredTensor
    scale: float
    magnitude: StoredTensor | None = None
    transposed: bool = False

    def merged(self, weight: NDArray[Any]) -> NDArray[Any]:
        """The weight with it, in the weight's type."""
        plain: FloatArray = weight.astype(np.float32)
        plain = plain.T if self.transposed else plain
        plain = plain + np.float32(self.scale) * (_floats(self.b) @ _floats(self.a))
        if self.magnitude is not None:
            plain *= (_floats(self.magnitude).reshape(-1) / np.linalg.norm(plain, axis=1))[:, None]
        with np.errstate(over="ignore"):  # refused below
            merged: NDArray[Any] = np.ascontiguousarray(plain.T if self.transposed else plain).astype(weight.dtype)
        if not np.isfinite(merged).all():
            raise CheckpointError(
                f"{self.b.file}: with {shown(self.b.name)} a weight is not finite in the checkpoint's type,"
                f" {merged.dtype}; the adapter is damaged, or of another checkpoint"
            )
        return merged


@dataclass(frozen=True)
class Adapter:
    """An opened adapter: headers are read and checked against the checkpoint, tensor data is not touched.

    added      name of a checkpoint's tensor -> what is added to it
    replaced   name of a checkpoint's tensor -> what replaces it
    """

    path: Path
    added: Mapping[str, LowRank]
    replaced: Mapping[str, StoredTensor]

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that it is read from."""
        return self.path / CONFIG, self.path / WEIGHTS

    @property
    def parts(self) -> list[StoredTensor]:
        """The tensors that are added to the checkpoint's."""
        return [part for low in self.added.values() for part in (low.a, low.b, low.magnitude) if part is not None]

    def apply(self, name: str, tensor: ir.ExternalTensor) -> ir.TensorProtocol:
        """The checkpoint's tensor with the adapter: a lazy one, made each time it is read."""
        low = self.added[name]

        def merge() -> ir.TensorProtocol:
            return ir.Tensor(apply_to_array(tensor, low.merged), tensor.dtype, name=name)

        return ir.LazyTensor(merge, tensor.dtype, tensor.shape, name=name)


def read_adapter(
    folder: Path, tensors: Mapping[str, StoredTensor], encoded: Iterable[str], rename: Rename = lambda name: name
) -> Adapter:
    """Open the adapter in `folder` for a checkpoint of these tensors, `encoded` those that are quantized.

    `rename` makes the checkpoint's name of a tensor from the adapter's.

    CheckpointError for one of another kind than LoRA, for modules that the checkpoint does not have or that have other
    shapes there, for tensors that are missing, and for a quantized checkpoint.
    """
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            is_pickled = (folder / "adapter_model.bin").is_file()
            advice = (
                "adapter_model.bin is a pickle, which Ingot never loads: save it as safetensors"
                if is_pickled
                else "an adapter is a folder that PEFT saved"
            )
            raise CheckpointError(f"{folder}: holds no {name}; {advice}")
    config = read_json_object(folder / CONFIG)
    _require_lora(folder / CONFIG, config)
    layers, replaced = _by_module(read_header(folder / WEIGHTS))
    if not layers and not replaced:
        raise CheckpointError(f"{folder / WEIGHTS}: holds no tensor; save the adapter again")
    scaling = _Scaling.of(folder / CONFIG, config)
    known = {*tensors, *encoded}
    added = {}
    for module, parts in layers.items():
        name = rename(f"{module}.weight")
        weight = _require_weight(folder, name, tensors, known)
        added[name] = _low_rank(folder / WEIGHTS, module, parts, weight, scaling)
    replacing = {rename(name): stored for name, stored in replaced.items()}
    for name, stored in replacing.items():
        weight = _require_weight(folder, name, tensors, known)
        if stored.shape != weight.shape:
            raise _contradiction(folder / WEIGHTS, stored, list(weight.shape))
        _require_float(stored)
    return Adapter(folder, added, replacing)


def _require_lora(file: Path, config: Mapping[str, Any]) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(f"{file}: peft_type is {shown(kind)}; Ingot merges LORA; merge others with PEFT itself")
    for key, harmless in _OTHER_KINDS.items():
        if config.get(key) not in harmless:
            raise CheckpointError(
                f"{file}: {key} is {shown(config[key])}, which Ingot does not merge; merge it with PEFT "
                "(merge_and_unload) and name the merged checkpoint"
            )


@dataclass(frozen=True)
class _Scaling:
    """How the file scales its matrices; patterns match a module's path, or its end after a dot, as PEFT's do."""

    file: Path
    rank: int
    alpha: float
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    is_stabilised: bool
    is_transposed: bool
    is_normed: bool

    @classmethod
    def of(cls, file: Path, config: Mapping[str, Any]) -> "_Scaling":
        """Read adapter_config.json; CheckpointError for a value that cannot be."""
        rank: Any = config.get("r")
        alpha = config.get("lora_alpha")
        ranks, alphas = config.get("rank_pattern") or {}, config.get("alpha_pattern") or {}
        if not _is_count(rank):
            raise CheckpointError(f"{file}: r is {shown(rank)}; it must be a whole number, 1 or above")
        if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not math.isfinite(alpha):
            raise CheckpointError(f"{file}: lora_alpha is {shown(alpha)}; it must be a number")
        if not isinstance(ranks, dict) or not all(map(_is_count, ranks.values())):
            raise CheckpointError(f"{file}: rank_pattern must be an object from names to ranks")
        if not isinstance(alphas, dict) or not all(isinstance(value, int | float) for value in alphas.values()):
            raise CheckpointError(f"{file}: alpha_pattern must be an object from names to numbers")
        flags = (bool(config.get(key)) for key in ("use_rslora", "fan_in_fan_out", "use_dora"))
        return cls(file, rank, float(alpha), ranks, alphas, *flags)

    def rank_of(self, module: str) -> int:
        """Rank of a module's matrices."""
        return self._matched(module, self.ranks, self.rank)

    def scale_of(self, module: str) -> float:
        """By what a module's B A is multiplied."""
        rank = self.rank_of(module)
        return self._matched(module, self.alphas, self.alpha) / (math.sqrt(rank) if self.is_stabilised else rank)

    def _matched(self, module: str, patterns: Mapping[str, _Number], default: _Number) -> _Number:
        for pattern, value in patterns.items():
            try:
                if re.fullmatch(rf"(.*\.)?({pattern})", module):
                    return value
            except re.error as error:
                raise CheckpointError(f"{self.file}: {shown(pattern)} is not a regular expression: {error}") from error
        return default


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _by_module(
    stored: Mapping[str, StoredTensor],
) -> tuple[dict[str, dict[str, StoredTensor]], dict[str, StoredTensor]]:
    """The parts of each module's low-rank matrices, and the other tensors by the names of those that they replace."""
    layers: dict[str, dict[str, StoredTensor]] = {}
    replaced = {}
    for full, tensor in stored.items():
        name = full.removeprefix(_PREFIX)
        part = next((part for part in _PARTS if name.endswith(f".{part}")), None)
        if part is None:
            replaced[name.replace(".modules_to_save.", ".")] = tensor
        else:
            layers.setdefault(name.removesuffix(f".{part}"), {})[_PARTS[part]] = tensor
    return layers, replaced


def _require_weight(folder: Path, name: str, tensors: Mapping[str, StoredTensor], known: set[str]) -> StoredTensor:
    if name in tensors:
        return tensors[name]
    if name in known:
        raise CheckpointError(
            f"{folder}: changes {shown(name)}, which the checkpoint stores quantized; an adapter is merged into 16 or "
            "32 bits: name the checkpoint that this one was made from"
        )
    raise CheckpointError(
        f"{folder}: changes {shown(name)}, which the checkpoint does not have.{did_you_mean(name, known)} Name the "
        "checkpoint that the adapter was trained on"
    )


def _low_rank(
    file: Path, module: str, parts: Mapping[str, StoredTensor], weight: StoredTensor, scaling: _Scaling
) -> LowRank:
    for part in ("a", "b"):
        if part not in parts:
            raise CheckpointError(f"{file}: holds no lora_{part.upper()} of {shown(module)}; save the adapter again")
    if ("magnitude" in parts) != scaling.is_normed:
        has = "holds a" if "magnitude" in parts else "holds no"
        raise CheckpointError(
            f"{file}: {has} magnitude of {shown(module)}, and use_dora is {str(scaling.is_normed).lower()} in {CONFIG};"
            " the two files belong to different adapters"
        )
    if len(weight.shape) != 2:
        raise CheckpointError(
            f"{file}: changes {shown(weight.name)}, which has {len(weight.shape)} axes, not two; merge it with PEFT"
        )
    rank = scaling.rank_of(module)
    rows, columns = reversed(weight.shape) if scaling.is_transposed else weight.shape
    expected = {"a": (rank, columns), "b": (rows, rank)}
    for part, shape in expected.items():
        if parts[part].shape != shape:
            raise _contradiction(file, parts[part], list(shape))
    magnitude = parts.get("magnitude")
    if magnitude is not None and math.prod(magnitude.shape) != rows:
        raise _contradiction(file, magnitude, [rows])
    for tensor in parts.values():
        _require_float(tensor)
    return LowRank(parts["a"], parts["b"], scaling.scale_of(module), magnitude, scaling.is_transposed)


def _require_float(stored: StoredTensor) -> None:
    if stored.dtype not in _FLOATS:
        raise CheckpointError(
            f"{stored.file}: {shown(stored.name)} is {stored.dtype}; it must be one of {', '.join(_FLOATS)}"
        )


def _contradiction(file: Path, stored: StoredTensor, wanted: list[int]) -> CheckpointError:
    return CheckpointError(
        f"{file}: {shown(stored.name)} has the shape {list(stored.shape)}, but {CONFIG} and the checkpoint require "
        f"{wanted}; name the checkpoint that the adapter was trained on"
    )


def _floats(stored: StoredTensor) -> FloatArray:
    values: FloatArray = load(stored).astype(np.float32)
    return values
