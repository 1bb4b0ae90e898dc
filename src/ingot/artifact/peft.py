"""Read a LoRA adapter in PEFT's form: its configuration, its matrices by module, and the scale of each.

    adapter_config.json          how the matrices are scaled
    adapter_model.safetensors    base_model.model.MODULE.lora_A.weight [rank, in], .lora_B.weight [out, rank], ...

    W' = W + scale B A           scale = alpha / rank, or alpha / sqrt(rank) with use_rslora

The compiler merges what is read here into a checkpoint's weights (pipeline/checkpoint/adapter.py); the runtime computes
it next to an artifact's (runtime/adapters.py). Sources: Hu et al. 2021 (LoRA), Kalajdzievski 2023 (rank-stabilised);
the layout of PEFT 0.21.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ingot.artifact.json_text import read_json_object
from ingot.artifact.safetensors import StoredTensor, read_header
from ingot.errors import CheckpointError, shown

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
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
class LowRankParts:
    """The stored matrices of a module: a [rank, in], b [out, rank], and for DoRA the magnitudes of the rows [out].

    rank    what the configuration says
    scale   by which B A is multiplied
    """

    module: str
    a: StoredTensor
    b: StoredTensor
    rank: int
    scale: float
    magnitude: StoredTensor | None = None

    def check(self, rows: int, columns: int) -> None:
        """CheckpointError unless the matrices have the rank, and change a weight [rows, columns]."""
        for tensor, shape in ((self.a, (self.rank, columns)), (self.b, (rows, self.rank))):
            if tensor.shape != shape:
                raise contradiction(tensor, shape)
        if self.magnitude is not None and math.prod(self.magnitude.shape) != rows:
            raise contradiction(self.magnitude, (rows,))

    @property
    def tensors(self) -> tuple[StoredTensor, ...]:
        """Its tensors in the file."""
        return tuple(part for part in (self.a, self.b, self.magnitude) if part is not None)


@dataclass(frozen=True)
class PeftAdapter:
    """A folder that PEFT saved: headers are read and checked, tensor data is not touched.

    layers          the low-rank matrices, by the module's name in the model that was trained
    replaced        other tensors (modules_to_save, biases), by the name of the tensor that each replaces
    is_transposed   the model stores its weights as [in, out] (fan_in_fan_out: Conv1D of gpt2)
    """

    path: Path
    layers: Mapping[str, LowRankParts]
    replaced: Mapping[str, StoredTensor]
    is_transposed: bool

    @property
    def files(self) -> tuple[Path, Path]:
        """The files that it is read from."""
        return self.path / CONFIG, self.path / WEIGHTS


def read_peft(folder: Path) -> PeftAdapter:
    """Open the adapter in `folder`.

    CheckpointError for one of another kind than LoRA, for tensors that are missing or contradict the configuration, and
    for an empty one. What its modules are is for the caller to check.
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
    parts = {module: _low_rank(folder / WEIGHTS, module, given, scaling) for module, given in layers.items()}
    for tensor in replaced.values():
        _require_float(tensor)
    return PeftAdapter(folder, parts, replaced, scaling.is_transposed)


def read_floats(stored: StoredTensor) -> NDArray[np.float32]:
    """Values of one of an adapter's tensors, widened to float32."""
    return stored.array().astype(np.float32, copy=False)


def contradiction(stored: StoredTensor, wanted: tuple[int, ...]) -> CheckpointError:
    """Return the error of a tensor whose shape contradicts the configuration."""
    return CheckpointError(
        f"{stored.file}: {shown(stored.name)} has the shape {list(stored.shape)}, but {CONFIG} and the model require "
        f"{list(wanted)}; name the model that the adapter was trained on"
    )


def _require_lora(file: Path, config: Mapping[str, Any]) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(f"{file}: peft_type is {shown(kind)}; Ingot reads LORA; merge others with PEFT itself")
    for key, harmless in _OTHER_KINDS.items():
        if config.get(key) not in harmless:
            raise CheckpointError(
                f"{file}: {key} is {shown(config[key])}, which Ingot does not compute; merge it with PEFT "
                "(merge_and_unload) and name the merged checkpoint"
            )


@dataclass(frozen=True)
class _Scaling:
    """Scales of the file's matrices; as in PEFT, patterns match a module's path, or its end after a dot."""

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
        """Read adapter_config.json; CheckpointError for an impossible value."""
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


def _low_rank(file: Path, module: str, parts: Mapping[str, StoredTensor], scaling: _Scaling) -> LowRankParts:
    for part in ("a", "b"):
        if part not in parts:
            raise CheckpointError(f"{file}: holds no lora_{part.upper()} of {shown(module)}; save the adapter again")
    if ("magnitude" in parts) != scaling.is_normed:
        has = "holds a" if "magnitude" in parts else "holds no"
        raise CheckpointError(
            f"{file}: {has} magnitude of {shown(module)}, and use_dora is {str(scaling.is_normed).lower()} in {CONFIG};"
            " the two files belong to different adapters"
        )
    for tensor in parts.values():
        _require_float(tensor)
    rank, scale = scaling.rank_of(module), scaling.scale_of(module)
    return LowRankParts(module, parts["a"], parts["b"], rank, scale, parts.get("magnitude"))


def _require_float(stored: StoredTensor) -> None:
    if stored.dtype not in _FLOATS:
        raise CheckpointError(
            f"{stored.file}: {shown(stored.name)} is {stored.dtype}; it must be one of {', '.join(_FLOATS)}"
        )
