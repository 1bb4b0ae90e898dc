"""A GGUF file's metadata of its own architecture: read with types, and nothing that changes the numbers is left out.

llama.cpp stores Llama 3.1's rotary embedding as factors that divide the frequencies, in the tensor rope_freqs.weight;
they are read as the parameters of config.json that give them, and written from these.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ingot.artifact.safetensors import StoredTensor
from ingot.errors import CheckpointError, shown
from ingot.pipeline.checkpoint.formats.codes import FloatArray
from ingot.pipeline.checkpoint.gguf_file import PLAIN_TYPES, GgufFile
from ingot.pipeline.model.rope import RopeParameters, inverse_frequencies

ROPE_FREQS = "rope_freqs.weight"
_READ = {
    *("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.layer_norm_rms_epsilon"),
    *("block_count", "context_length", "embedding_length", "feed_forward_length", "rope.freq_base"),
    "rope.scaling.type",
}
_CHANGES_NOTHING = {
    *("vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "rope.scaling.original_context_length"),
}
_ORIGINAL_POSITIONS = [1 << bits for bits in range(9, 21)]
_LOW, _HIGH = 1.0, 4.0  # every release of Llama 3 has these


class GgufMetadata:
    """Keys of the file's own architecture."""

    def __init__(self, file: GgufFile) -> None:
        self._file, self._prefix = file, file.metadata.get("general.architecture")

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or the default."""
        return self._file.metadata.get(f"{self._prefix}.{key}", default)

    def size(self, key: str, default: int | None = None) -> int:
        """A whole number from 1; CheckpointError for another value, or without one and a default."""
        value = self._need(key, default)
        if type(value) is not int or value < 1:
            raise self._wrong(key, value, "a whole number from 1")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number; CheckpointError for another value, or without one and a default."""
        value = self._need(key, default)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self._wrong(key, value, "a finite number")
        return float(value)

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.size("attention.key_length", self.size("embedding_length") // self.size("attention.head_count"))

    def require_followed(self) -> None:
        """Raise CheckpointError for a key that would change the numbers and is not followed. 0 and false switch off."""
        required = {
            "attention.value_length": self.head_dim,
            "rope.dimension_count": self.head_dim,
            "rope.scaling.factor": 1,
            "rope.scale_linear": 1,
            "attention.causal": True,
        }
        for name, value in self._file.metadata.items():
            key = name.removeprefix(f"{self._prefix}.")
            if key == name or key in _READ or key in _CHANGES_NOTHING:
                continue
            allowed = required.get(key, 0)
            if value != allowed and (value or key == "attention.causal"):
                raise CheckpointError(
                    f"{self._file.path}: {name} is {shown(value)}, which Ingot does not follow: it must be absent or "
                    f"{allowed}. Build from the Hugging Face checkpoint that the file was made of"
                )

    def _need(self, key: str, default: float | None) -> Any:
        value = self.get(key, default)
        if value is None:
            raise CheckpointError(f"{self._file.path}: its metadata lacks {self._prefix}.{key}; convert it again")
        return value

    def _wrong(self, key: str, value: object, wanted: str) -> CheckpointError:
        return CheckpointError(f"{self._file.path}: {self._prefix}.{key} is {shown(value)}; it must be {wanted}")


def rope_factors(rope: RopeParameters) -> FloatArray | None:
    """Return what divides each frequency of Llama 3.1's rotary embedding, [rotary_dim / 2]; None for a plain one."""
    if rope.kind != "llama3":
        return None
    return _plain_frequencies(rope.theta, rope.rotary_dim) / inverse_frequencies(rope, rope.max_positions)


def rope_scaling(file: GgufFile, theta: float) -> Mapping[str, Any] | None:
    """The rope_scaling of config.json that gives the file's factors; None for a file without them.

    CheckpointError for factors that are not those of Llama 3.1.
    """
    if ROPE_FREQS not in file.tensors:
        return None
    tensor, head_dim = file.tensors[ROPE_FREQS], GgufMetadata(file).head_dim
    if tensor.type_id not in PLAIN_TYPES or tensor.shape != (head_dim // 2,):
        raise CheckpointError(
            f"{file.path}: {ROPE_FREQS} is {list(tensor.shape)}; it must be floats [{head_dim // 2}], one a frequency"
        )
    dtype = PLAIN_TYPES[tensor.type_id][0]
    stored = StoredTensor(ROPE_FREQS, dtype, tensor.shape, file.path, tensor.offset, tensor.num_bytes)
    factors = stored.array().astype(np.float32)
    found = parameters_of_factors(factors, theta)
    if found is None:
        raise CheckpointError(
            f"{file.path}: {ROPE_FREQS} scales the rotary frequencies by {shown(factors.tolist())}, which are not the "
            "factors of Llama 3.1; build from the Hugging Face checkpoint that the file was made of"
        )
    return found


def parameters_of_factors(factors: FloatArray, theta: float) -> dict[str, Any] | None:
    """The parameters of Llama 3.1's rotary embedding that give these factors; None for other factors."""
    largest = round(float(factors.max(initial=1)), 4)
    for original in _ORIGINAL_POSITIONS if math.isfinite(largest) and theta > 1 else ():
        rope = RopeParameters("llama3", theta, 2 * len(factors), original, original, largest, None, _LOW, _HIGH)
        made = rope_factors(rope)
        if made is not None and np.allclose(made, factors, rtol=1e-4, atol=0):
            return {
                "rope_type": "llama3",
                "factor": largest,
                "low_freq_factor": _LOW,
                "high_freq_factor": _HIGH,
                "original_max_position_embeddings": original,
            }
    return None


def _plain_frequencies(theta: float, rotary_dim: int) -> FloatArray:
    return inverse_frequencies(RopeParameters("default", theta, rotary_dim, 1, 1), 1)
