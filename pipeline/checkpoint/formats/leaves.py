"""The tensors of a quantized layer: each format has one table of them, which everything that reads a checkpoint checks.

A row says what a leaf is called, which dtypes it may have and which shapes, in the names of the layer's sizes:

    Leaf("qzeros", PACKED, [("groups", "out words")])

The method gives the sizes, from its settings and the shape of one leaf. `check_leaves` then refuses what is missing, of
another dtype or shape, or not in the table: decoding such tensors gives numbers all the same, and wrong ones.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from ingot.artifact.safetensors import StoredTensor
from ingot.errors import ConfigError, one_of, shown

Shape = tuple[str | int, ...]  # names of sizes, or numbers
Sizes = Mapping[str, int]
Stored = Mapping[str, StoredTensor]  # leaf name -> place in a file

FLOATS = ("F16", "BF16", "F32")
PLAIN = (*FLOATS, "F64")  # types of a weight that is not quantized
BYTES = ("U8",)
FP8 = ("F8_E4M3",)
E8M0 = ("F8_E8M0",)
PACKED = ("I32",)
INDICES = ("I32", "I64")
SCALAR: tuple[Shape, ...] = ((), (1,))
OWN_LEAVES = ("weight", "bias")  # leaves of a layer that is not quantized


@dataclass(frozen=True)
class Leaf:
    """A tensor of a quantized layer.

    dtypes      allowed types, as safetensors names them
    shapes      allowed shapes, the usual one first
    is_needed   whether a layer cannot be without it
    reason      why, if a setting decides it; ends the sentence "has no ..., which ... needs"
    """

    name: str
    dtypes: Sequence[str]
    shapes: Sequence[Shape]
    is_needed: bool = True
    reason: str = ""


def check_leaves(
    table: Sequence[Leaf], leaves: Stored, sizes_of: Callable[[Stored], Sizes], owner: str
) -> tuple[Stored, Sizes]:
    """Return the leaves of the table that the layer has, and its sizes. ConfigError names the leaf and what is allowed.

    sizes_of    derives the sizes from leaves whose dtypes and numbers of axes are right
    owner       the format, for messages
    """
    found = {leaf.name: leaves[leaf.name] for leaf in table if leaf.name in leaves}
    for leaf in table:
        if leaf.name in found:
            _check_type(leaf, found[leaf.name], owner)
        elif leaf.is_needed:
            raise ConfigError(f"has no {leaf.name!r}, which {owner} needs{leaf.reason}; it holds {one_of(leaves)}")
    _refuse_others(table, leaves, owner)
    sizes = sizes_of(found)
    for leaf in table:
        if leaf.name in found:
            _check_shape(leaf, found[leaf.name], sizes, owner)
    return found, sizes


def _check_type(leaf: Leaf, stored: StoredTensor, owner: str) -> None:
    if stored.dtype not in leaf.dtypes:
        raise ConfigError(f"{leaf.name!r} is {stored.dtype}; {owner} stores it as {' or '.join(leaf.dtypes)}")
    if len(stored.shape) not in {len(shape) for shape in leaf.shapes}:
        raise ConfigError(
            f"{leaf.name!r} has the shape {shown(list(stored.shape))}; {owner} stores it as {_words(leaf.shapes)}"
        )


def _refuse_others(table: Sequence[Leaf], leaves: Collection[str], owner: str) -> None:
    """Refuse leaves of a quantized layer that are unknown to this format."""
    known = {leaf.name for leaf in table}
    for name in sorted(leaves):
        if name in QUANTIZED_LEAVES and name not in known:
            raise ConfigError(f"has a {name!r}, which {owner} does not have; it has {one_of(known)}")


def _check_shape(leaf: Leaf, stored: StoredTensor, sizes: Sizes, owner: str) -> None:
    allowed = {tuple(sizes[axis] if isinstance(axis, str) else axis for axis in shape): shape for shape in leaf.shapes}
    if stored.shape in allowed:
        return
    needed = " or ".join(str(list(shape)) for shape in allowed)
    raise ConfigError(
        f"{leaf.name!r} has the shape {shown(list(stored.shape))}; {owner} needs {_words(leaf.shapes)}, which is "
        f"{needed}, for a weight of {[sizes['out'], sizes['in']]}"
    )


def _words(shapes: Sequence[Shape]) -> str:
    return " or ".join(f"[{', '.join(map(str, shape))}]" for shape in shapes)


# Names of leaves of quantized layers alone. Such a tensor is refused where no quantized layer owns it.
QUANTIZED_LEAVES = frozenset(
    {
        *("qweight", "qzeros", "g_idx", "scales"),
        *("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_global_scale", "weight_shape"),
        *("weight_scale_2", "pre_quant_scale", "weight_scale_inv"),
        *("absmax", "quant_map", "nested_absmax", "nested_quant_map", "SCB", "weight_format"),
    }
)
