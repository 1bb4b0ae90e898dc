"""Metadata of a pruned model: its current facts and KV geometry, and what was removed."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import onnx_ir as ir

from ingot.artifact import KVGeometry, ModelFacts
from ingot.errors import PassError

STRUCTURE_KEY = "ingot.prune-structure"  # model.metadata_props: JSON of StructureFacts
MASKS_KEY = "ingot.prune-weights"  # model.metadata_props: JSON, see prune_weights.py
_HEADS = ("num_heads", "num_kv_heads", "head_dim")


@dataclass(frozen=True)
class StructureFacts:
    """The shape of a pruned model, where it differs from the checkpoint's.

    layers               the kept layers, by their numbers in the checkpoint
    influence            block influence of all layers before any was removed; empty if none was
    intermediate_sizes   sizes of pruned feed-forwards; empty if none was pruned
    sites                {name, kind, kept, of, output_error} of the linear layers that lost inputs
    """

    layers: tuple[int, ...]
    influence: tuple[float, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_sizes: tuple[int, ...]
    sites: tuple[Mapping[str, object], ...]

    @classmethod
    def of(cls, model: ir.Model) -> "StructureFacts | None":
        """The model's, or None where nothing was pruned."""
        text = model.metadata_props.get(STRUCTURE_KEY)
        if text is None:
            return None
        found: dict[str, Any] = json.loads(text)
        return cls(**(found | {key: tuple(value) for key, value in found.items() if isinstance(value, list)}))


def record_structure(
    model: ir.Model,
    layers: Sequence[int],
    influence: Sequence[float],
    sites: Sequence[Mapping[str, object]],
    removed: int,
) -> None:
    """Write the facts after a pruning that kept `layers`, numbered as before, and removed that many weight elements."""
    before = StructureFacts.of(model)
    heads = _heads(model)
    sizes = tuple(sorted({int(str(site["kept"])) for site in sites if site["kind"] == "ffn"}))
    facts = StructureFacts(
        layers=tuple(layers) if before is None else tuple(before.layers[number] for number in layers),
        influence=tuple(influence) or (before.influence if before else ()),
        num_heads=heads["num_heads"],
        num_kv_heads=heads["num_kv_heads"],
        head_dim=heads["head_dim"],
        intermediate_sizes=sizes or (before.intermediate_sizes if before else ()),
        sites=(*(before.sites if before else ()), *sites),
    )
    model.metadata_props[STRUCTURE_KEY] = json.dumps(asdict(facts))
    _update(model, facts, removed)


def refuse_to_fill_zeros(model: ir.Model) -> None:
    """PassError for a pass that would overwrite the zeros of prune-weights."""
    if MASKS_KEY in model.metadata_props:
        raise PassError("the zeros that prune-weights made would be lost; list prune-weights after it")


def _update(model: ir.Model, facts: StructureFacts, removed: int) -> None:
    """Update model facts and KV geometry, where the model has them."""
    if "ingot.model" in model.metadata_props:
        known = ModelFacts.model_validate_json(model.metadata_props["ingot.model"])
        changed = {"num_layers": len(facts.layers), "num_parameters": known.num_parameters - removed}
        model.metadata_props["ingot.model"] = known.model_copy(update=changed).model_dump_json()
    if "ingot.kv" in model.metadata_props:
        geometry = KVGeometry.model_validate_json(model.metadata_props["ingot.kv"])
        changed = {"num_layers": len(facts.layers), "num_kv_heads": facts.num_kv_heads}
        model.metadata_props["ingot.kv"] = geometry.model_copy(update=changed).model_dump_json()


def _heads(model: ir.Model) -> dict[str, int]:
    """Head counts of the attentions. PassError if they differ: the KV cache has one shape for all layers."""
    found = {
        tuple(node.attributes.get_int(name, 0) or 0 for name in _HEADS)
        for node in model.graph
        if node.op_type == "PagedAttention"
    }
    if len(found) != 1:
        raise PassError(f"layers would have different heads {sorted(found)}; the KV cache has one shape for all layers")
    return dict(zip(_HEADS, found.pop(), strict=True))
