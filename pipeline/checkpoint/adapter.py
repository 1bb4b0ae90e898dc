"""A LoRA adapter in PEFT's form (ingot.artifact.peft), merged into a checkpoint's weights each time they are read.

    W' = W + scale B A
    W' = m (W + scale B A) / |W + scale B A|       DoRA: m [out] is lora_magnitude_vector, norms are of rows

Other tensors of an adapter (modules_to_save, biases) replace the checkpoint's. A sum is computed in float32 and rounded
once to the checkpoint's type. Source of DoRA: Liu et al. 2024.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.artifact.peft import LowRankParts, contradiction, read_floats, read_peft
from ingot.artifact.safetensors import StoredTensor
from ingot.errors import CheckpointError, did_you_mean, shown
from ingot.passes.weights import apply_to_array
from ingot.pipeline.checkpoint.formats.codes import FloatArray

Rename = Callable[[str], str]


@dataclass(frozen=True)
class LowRank:
    """The low-rank change of a weight [out, in].

    transposed   the checkpoint stores it as [in, out] (Conv1D of gpt2)
    """

    parts: LowRankParts
    transposed: bool = False

    def merged(self, weight: NDArray[Any]) -> NDArray[Any]:
        """The weight with it, in the weight's type."""
        b = self.parts.b
        plain: FloatArray = weight.astype(np.float32)
        plain = plain.T if self.transposed else plain
        plain = plain + np.float32(self.parts.scale) * (read_floats(b) @ read_floats(self.parts.a))
        if self.parts.magnitude is not None:
            plain *= (read_floats(self.parts.magnitude).reshape(-1) / np.linalg.norm(plain, axis=1))[:, None]
        with np.errstate(over="ignore"):  # refused below
            merged: NDArray[Any] = np.ascontiguousarray(plain.T if self.transposed else plain).astype(weight.dtype)
        if not np.isfinite(merged).all():
            raise CheckpointError(
                f"{b.file}: with {shown(b.name)} a weight is not finite in the checkpoint's type,"
                f" {merged.dtype}; the adapter is damaged, or of another checkpoint"
            )
        return merged


@dataclass(frozen=True)
class CheckpointAdapter:
    """An opened adapter: headers are read and checked against the checkpoint, tensor data is not touched.

    files      that it is read from
    added      name of a checkpoint's tensor -> what is added to it
    replaced   name of a checkpoint's tensor -> what replaces it
    """

    files: tuple[Path, ...]
    added: Mapping[str, LowRank]
    replaced: Mapping[str, StoredTensor]

    @property
    def parts(self) -> list[StoredTensor]:
        """The tensors that are added to the checkpoint's."""
        return [tensor for low in self.added.values() for tensor in low.parts.tensors]

    def apply(self, name: str, tensor: ir.ExternalTensor) -> ir.TensorProtocol:
        """The checkpoint's tensor with the adapter: a lazy one, made each time it is read."""
        low = self.added[name]

        def merge() -> ir.TensorProtocol:
            return ir.Tensor(apply_to_array(tensor, low.merged), tensor.dtype, name=name)

        return ir.LazyTensor(merge, tensor.dtype, tensor.shape, name=name)


def read_adapter(
    folder: Path, tensors: Mapping[str, StoredTensor], encoded: Iterable[str], rename: Rename = lambda name: name
) -> CheckpointAdapter:
    """Open the adapter in `folder` for a checkpoint of these tensors, `encoded` those that are quantized.

    `rename` makes the checkpoint's name of a tensor from the adapter's.

    CheckpointError for one of another kind than LoRA, for modules that the checkpoint does not have or that have other
    shapes there, for tensors that are missing, and for a quantized checkpoint.
    """
    opened = read_peft(folder)
    known = {*tensors, *encoded}
    added = {}
    for module, parts in opened.layers.items():
        name = rename(f"{module}.weight")
        weight = _require_weight(folder, name, tensors, known)
        _check(parts, weight, opened.is_transposed)
        added[name] = LowRank(parts, opened.is_transposed)
    replacing = {rename(name): stored for name, stored in opened.replaced.items()}
    for name, stored in replacing.items():
        weight = _require_weight(folder, name, tensors, known)
        if stored.shape != weight.shape:
            raise contradiction(stored, weight.shape)
    return CheckpointAdapter(opened.files, added, replacing)


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


def _check(parts: LowRankParts, weight: StoredTensor, is_transposed: bool) -> None:
    if len(weight.shape) != 2:
        raise CheckpointError(
            f"{parts.a.file}: changes {shown(weight.name)}, which has {len(weight.shape)} axes, not two; merge it with"
            " PEFT"
        )
    rows, columns = reversed(weight.shape) if is_transposed else weight.shape
    parts.check(rows, columns)
