"""Metadata of a pruned model: its current facts and KV geometry, and what was removed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from ingot.artifact import KVGeometry
from ingot.errors import PassError
from ingot.passes.model_facts import KV, MODEL, Fact, WeightFacts
from ingot.passes.rewriting import attentions, head_counts

MASKS_FACTS = Fact("ingot.prune-weights", WeightFacts)  # see prune_weights.py


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
    sites: tuple[Mapping[str, Any], ...]


STRUCTURE_FACTS = Fact("ingot.prune-structure", StructureFacts)


def record_structure(
    model: ir.Model,
    layers: Sequence[int],
    influence: Sequence[float],
    sites: Sequence[Mapping[str, object]],
    removed: int,
) -> None:
    """Write the facts after a pruning that kept `layers`, numbered as before, and removed that many weight elements."""
    before = STRUCTURE_FACTS.find(model)
    num_heads, num_kv_heads, head_dim = _heads(model)
    sizes = tuple(sorted({int(str(site["kept"])) for site in sites if site["kind"] == "ffn"}))
    facts = StructureFacts(
        layers=tuple(layers) if before is None else tuple(before.layers[number] for number in layers),
        influence=tuple(influence) or (before.influence if before else ()),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_sizes=sizes or (before.intermediate_sizes if before else ()),
        sites=(*(before.sites if before else ()), *sites),
    )
    STRUCTURE_FACTS.record(model, facts)
    _update(model, facts, layers, removed)


def refuse_to_fill_zeros(model: ir.Model) -> None:
    """PassError for a pass that would overwrite the zeros of prune-weights."""
    if MASKS_FACTS.is_in(model):
        raise PassError("the zeros that prune-weights made would be lost; list prune-weights after it")


def _update(model: ir.Model, facts: StructureFacts, layers: Sequence[int], removed: int) -> None:
    """Update model facts and KV geometry, where the model has them."""
    if (known := MODEL.find(model)) is not None:
        changed = {"num_layers": len(facts.layers), "num_parameters": known.num_parameters - removed}
        MODEL.record(model, known.model_copy(update=changed))
    if (geometry := KV.find(model)) is not None:
        KV.record(model, _kept(geometry, layers, facts.num_kv_heads))


def _kept(geometry: KVGeometry, layers: Sequence[int], num_kv_heads: int) -> KVGeometry:
    """The geometry of the kept layers, which have so many KV heads each."""
    if geometry.unequal:
        raise PassError(f"the model has {geometry.unequal}; only layers of one shape can be pruned")
    window = tuple(geometry.layers[number].window for number in layers)
    changed = {"num_layers": len(layers), "num_kv_heads": num_kv_heads, "window": window}
    return KVGeometry.model_validate({**geometry.model_dump(), **changed})


def _heads(model: ir.Model) -> tuple[int, int, int]:
    """Head counts of the attentions. PassError if they differ: the KV cache has one shape for all layers."""
    found = {head_counts(node) for node in attentions(model.graph)}
    if len(found) != 1:
        raise PassError(f"layers would have different heads {sorted(found)}; the KV cache has one shape for all layers")
    return found.pop()
