"""A LoRA adapter in memory: what it adds to each linear layer of one artifact's program.

    y = W x + B (A x)        A [rank, in], B [rows, rank] with its scale multiplied in, both float32

x is the layer's input after its norm and before any rounding to 8 bits; B (A x) joins W x before alpha, bias, cap and
activation. B's rows are those from `first_row` on of the layer's output, in the order of its bias: of a gate and an up
projection in one matrix of pairs, all of the gate's come first.

An adapter's digest covers these numbers and their places, and nothing else: two folders with equal effect are one
adapter, whatever their names, and a file that changed is another.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ingot.artifact.peft import LowRankParts, PeftAdapter, read_floats, read_peft
from ingot.artifact.programs.projections import Projection
from ingot.errors import AdapterError, CheckpointError, did_you_mean, one_of, shown

FloatArray = NDArray[np.float32]
_MERGE = "merge it at build time instead (adapter: in the recipe)"
_SHOWN_MODULES = 3


@dataclass(frozen=True, eq=False)
class LowRankUpdate:
    """What an adapter adds to rows first_row .. first_row + rows of a linear layer: b @ (a @ x).

    module   the checkpoint's name of these rows
    a        [rank, in]
    b        [rows, rank], the adapter's scale multiplied in
    """

    module: str
    first_row: int
    a: FloatArray
    b: FloatArray

    @property
    def rank(self) -> int:
        """Inner size of the two matrices."""
        return len(self.a)


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter for one artifact.

    changes   name of a linear layer of the program (`node`) -> what is added to its rows, in the order of the rows
    """

    name: str
    changes: Mapping[str, Sequence[LowRankUpdate]]

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all numbers and where they belong: the key of its keys and values in every cache."""
        digest = sha256()
        for node in sorted(self.changes):
            for low in self.changes[node]:
                digest.update(f"{node}\0{low.first_row}\0{low.a.shape}\0{low.b.shape}\0".encode())
                digest.update(np.ascontiguousarray(low.a).data)
                digest.update(np.ascontiguousarray(low.b).data)
        return digest.hexdigest()

    @property
    def rank(self) -> int:
        """Largest rank of its matrices."""
        return max(low.rank for low in self._all)

    @property
    def num_bytes(self) -> int:
        """Bytes of its matrices in float32."""
        return sum(low.a.nbytes + low.b.nbytes for low in self._all)

    @property
    def _all(self) -> Iterator[LowRankUpdate]:
        return (low for changes in self.changes.values() for low in changes)


def read_adapter(name: str, folder: Path, projections: Sequence[Projection]) -> Adapter:
    """Read the folder that PEFT saved, for a program with these projections.

    AdapterError for a folder that cannot be read, for an adapter of a kind that cannot be computed next to others in a
    batch, for modules that the program does not have or that have other shapes there, and for NaN and Inf.
    """
    try:
        opened = read_peft(folder)
        _require_batchable(opened)
        places = _places(name, opened, projections)
        changes: dict[str, list[LowRankUpdate]] = {}
        for projection, parts in places:
            parts.check(projection.rows, projection.columns)
            low = LowRankUpdate(projection.module, projection.first_row, *_matrices(parts))
            changes.setdefault(projection.node, []).append(low)
    except CheckpointError as error:
        raise AdapterError(f"the adapter {shown(name)} cannot be loaded: {error}") from error
    except OSError as error:
        raise AdapterError(f"the adapter {shown(name)} cannot be read: {folder}: {error.strerror}") from error
    return Adapter(name, {node: sorted(lows, key=lambda low: low.first_row) for node, lows in changes.items()})


def _require_batchable(opened: PeftAdapter) -> None:
    embeddings = sorted({stored for stored in opened.replaced if "lora_embedding_" in stored})
    if embeddings:
        raise CheckpointError(
            f"{opened.path}: changes an embedding ({shown(embeddings[0])}), which Ingot does not compute; merge it with"
            " PEFT (merge_and_unload) and build the merged checkpoint"
        )
    if opened.replaced:
        raise CheckpointError(
            f"{opened.path}: replaces {_some(opened.replaced)} (modules_to_save or biases), which the requests of a"
            f" batch share; {_MERGE}"
        )
    normed = [module for module, parts in opened.layers.items() if parts.magnitude is not None]
    if normed:
        raise CheckpointError(
            f"{opened.path}: use_dora is true, and DoRA scales whole rows of {_some(normed)}, which the requests of a"
            f" batch share; {_MERGE}"
        )


def _places(name: str, opened: PeftAdapter, projections: Sequence[Projection]) -> list[tuple[Projection, LowRankParts]]:
    """Where each module's matrices belong: a module that layers share is there more than once."""
    by_module: dict[str, list[Projection]] = {}
    for projection in projections:
        by_module.setdefault(projection.module, []).append(projection)
    if not by_module:
        raise CheckpointError(
            f"{opened.path}: the artifact does not say which of its layers are which of the checkpoint's; build it"
            " again, and without passes that rotate or scale the layers' inputs"
        )
    missing = [module for module in opened.layers if module not in by_module]
    if missing:
        kinds = {module.rpartition(".")[2] for module in by_module}
        raise CheckpointError(
            f"{opened.path}: changes {_some(missing)}, for which the artifact has no layer of its own;"
            f" it has {one_of(kinds)} in {len(by_module)} modules.{did_you_mean(missing[0], by_module)} Name the"
            f" artifact of the model that {shown(name)} was trained on, or {_MERGE}"
        )
    return [(projection, parts) for module, parts in opened.layers.items() for projection in by_module[module]]


def _matrices(parts: LowRankParts) -> tuple[FloatArray, FloatArray]:
    """A, and B with the scale. CheckpointError for values that are not finite."""
    a, b = read_floats(parts.a), read_floats(parts.b)
    with np.errstate(over="ignore", invalid="ignore"):  # refused below
        b = b * np.float32(parts.scale)
    for stored, values in ((parts.a, a), (parts.b, b)):
        if not np.isfinite(values).all():
            raise CheckpointError(f"{stored.file}: {shown(stored.name)} has NaN or Inf; the adapter is damaged")
    return a, b


def _some(names: Iterable[str]) -> str:
    """The first names, and how many there are besides."""
    all_names = list(names)
    more = len(all_names) - _SHOWN_MODULES
    return ", ".join(map(shown, all_names[:_SHOWN_MODULES])) + (f" and {more} more" if more > 0 else "")
