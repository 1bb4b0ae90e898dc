"""Configuration and tokenizer of the checkpoint, which an artifact keeps with its weights.

Both are in the folder tokenizer/. config.json is written as the compiler understood it: that of a GGUF file with the
keys of Hugging Face, that of a quantized checkpoint without the description of its encodings, that of a pruned model
with its new shapes.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ingot.artifact import Artifact
from ingot.artifact.safetensors import read_header
from ingot.errors import ArtifactError, UsageError
from ingot.passes.pruned_facts import STRUCTURE_FACTS, StructureFacts
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.checkpoint.config.decoder import read_config
from ingot.pipeline.checkpoint.config.layers import LayerConfig
from ingot.pipeline.targets.segments.split import WEIGHTS

FOLDER = "tokenizer"
CONFIG = f"{FOLDER}/config.json"
_BY_RULE = (
    "from-max-window-layers",
    "alternating",
    "pattern",
    "pattern-or-none",
    "unrotated",
)  # a layer's number decides its window


def seal_checkpoint(checkpoint: Checkpoint, folder: Path) -> None:
    """Copy the tokenizer's and generation's files unchanged into folder/tokenizer, and write config.json there."""
    (folder / FOLDER).mkdir()
    for name, file in checkpoint.tokenizer_files.items():
        shutil.copyfile(file, folder / FOLDER / name)
    text = json.dumps(dict(checkpoint.config), indent=2, sort_keys=True) + "\n"
    (folder / CONFIG).write_text(text, encoding="utf-8")


def sealed_checkpoint(artifact: Artifact) -> Checkpoint:
    """The artifact's configuration and tokenizer as a checkpoint, with the tensors that the program stores.

    UsageError for an artifact of an older Ingot, which has no configuration.
    """
    if not artifact.has(CONFIG):
        raise UsageError(
            f"{artifact.path}: the artifact holds no {CONFIG}, which says what its weights are called; it was built by "
            "an older Ingot: build it again, or name its recipe and checkpoint instead of the artifact"
        )
    generation = f"{FOLDER}/generation_config.json"
    return Checkpoint(
        artifact.path / FOLDER,
        artifact.json_object(CONFIG),
        artifact.json_object(generation) if artifact.has(generation) else {},
        read_header(artifact.file(f"program/{WEIGHTS}"), ArtifactError, "build the artifact again"),
        readable=frozenset(artifact.files_below(FOLDER)),
    )


def as_pruned(checkpoint: Checkpoint, model: ir.Model) -> Checkpoint:
    """The checkpoint with the configuration of the pruned model; unchanged if nothing was pruned.

    UsageError when feed-forwards were pruned to several sizes: config.json has one intermediate_size for all; and when
    heads were pruned in a family whose head_dim follows from their number.
    """
    facts = STRUCTURE_FACTS.find(model)
    if facts is None:
        return checkpoint
    return replace(checkpoint, config=_pruned(checkpoint, facts))


def _pruned(checkpoint: Checkpoint, facts: StructureFacts) -> Mapping[str, Any]:
    before = read_config(checkpoint)
    names = before.family.keys
    config = dict(checkpoint.config)
    if len(facts.intermediate_sizes) > 1:
        sizes = ", ".join(map(str, facts.intermediate_sizes))
        raise UsageError(
            f"feed-forwards were pruned to {sizes} neurons, and config.json has one intermediate_size for all; give "
            "prune-structure a number of neurons instead of a share"
        )
    if facts.intermediate_sizes:
        config[names.get("intermediate_size", "intermediate_size")] = facts.intermediate_sizes[0]
    if facts.num_kv_heads != before.num_kv_heads:
        if before.family.fixed_head_dim:
            raise UsageError(
                f"heads were pruned, and a {before.model_type} model has heads of hidden_size / num_attention_heads; "
                "give prune-structure no kv_groups"
            )
        config["num_attention_heads"], config["num_key_value_heads"] = facts.num_heads, facts.num_kv_heads
        config["head_dim"] = facts.head_dim  # no longer hidden_size / num_attention_heads
    if len(facts.layers) != len(before.layers):
        config[names.get("num_hidden_layers", "num_hidden_layers")] = len(facts.layers)
        config |= _by_layer(checkpoint, [before.layers[number] for number in facts.layers])
    return config


def _by_layer(checkpoint: Checkpoint, layers: list[LayerConfig]) -> dict[str, Any]:
    """Keys for the facts that the family derives from a layer's number, with values of the layers that stay."""
    family, changed = read_config(checkpoint).family, dict[str, Any]()
    if family.windows in _BY_RULE or "layer_types" in checkpoint.config:
        kinds = ("full_attention", "sliding_attention")
        changed["layer_types"] = [kinds[bool(layer.window)] for layer in layers]
    if "no_rope_layers" in family.defaults:
        changed["no_rope_layers"] = [int(layer.rope is not None) for layer in layers]
    if family.rotated == "thetas":
        changed["layer_rope_theta"] = [0.0 if layer.rope is None else layer.rope.theta for layer in layers]
    return changed
