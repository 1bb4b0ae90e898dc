"""config.json of a model after structured pruning, so that any reader of the checkpoint sees the shapes it now has."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import onnx_ir as ir

from ingot.errors import UsageError
from ingot.passes.pruning.pruned_facts import StructureFacts
from ingot.pipeline.checkpoint import Checkpoint
from ingot.pipeline.config import LayerConfig, read_config

_BY_RULE = ("from-max-window-layers", "alternating", "pattern", "unrotated")  # a layer's number decides its window


def as_pruned(checkpoint: Checkpoint, model: ir.Model) -> Checkpoint:
    """The checkpoint with the configuration of the pruned model; the same one where nothing was pruned.

    UsageError when feed-forwards were pruned to several sizes: config.json has one intermediate_size for all.
    """
    facts = StructureFacts.of(model)
    if facts is None:
        return checkpoint
    return replace(checkpoint, config=_pruned(checkpoint, facts))


def _pruned(checkpoint: Checkpoint, facts: StructureFacts) -> Mapping[str, Any]:
    before = read_config(checkpoint)
    config = dict(checkpoint.config)
    if len(facts.intermediate_sizes) > 1:
        sizes = ", ".join(map(str, facts.intermediate_sizes))
        raise UsageError(
            f"feed-forwards were pruned to {sizes} neurons, and config.json has one intermediate_size for all; give "
            "prune-structure a number of neurons instead of a share"
        )
    if facts.intermediate_sizes:
        config["intermediate_size"] = facts.intermediate_sizes[0]
    if facts.num_kv_heads != before.num_kv_heads:
        config["num_attention_heads"], config["num_key_value_heads"] = facts.num_heads, facts.num_kv_heads
        config["head_dim"] = facts.head_dim  # no longer hidden_size / num_attention_heads
    if len(facts.layers) != len(before.layers):
        config["num_hidden_layers"] = len(facts.layers)
        config |= _by_layer(checkpoint, [before.layers[number] for number in facts.layers])
    return config


def _by_layer(checkpoint: Checkpoint, layers: list[LayerConfig]) -> dict[str, Any]:
    """What the family derives from a layer's number, spelled out for the layers that stay."""
    family, changed = read_config(checkpoint).family, dict[str, Any]()
    if family.windows in _BY_RULE or "layer_types" in checkpoint.config:
        kinds = ("full_attention", "sliding_attention")
        changed["layer_types"] = [kinds[bool(layer.window)] for layer in layers]
    if "no_rope_layers" in family.defaults:
        changed["no_rope_layers"] = [int(layer.rope is not None) for layer in layers]
    return changed
