"""What a build knows of its quantized weights, as evidence: the passes' statistics, stored bytes, KL of each alone."""

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from ingot.builder.layer_kl import KlOptions, LayerKl, layer_kl, quantized_weights
from ingot.builder.weight_watch import WeightWatch
from ingot.passes.quantization.quantize_weights import QUANTIZATION_KEY
from ingot.pipeline.compile import Compiled
from ingot.pipeline.formats.activations import ActivationScheme
from ingot.pipeline.recipe import Recipe
from ingot.pipeline.stored_bytes import stored_bytes
from ingot.validation.quantization import Quantization, QuantizedWeight

_FIELDS = {field.name for field in fields(QuantizedWeight)}


def quantization_of(recipe: Recipe, compiled: Compiled, watch: WeightWatch, folder: Path) -> Quantization:
    """Of a recipe that was compiled into `folder`. KL is measured as far as the recipe's evaluation asks for it."""
    rows = json.loads(compiled.facts.get(QUANTIZATION_KEY, '{"weights": []}'))["weights"]
    if not rows:
        return Quantization()
    sizes = stored_bytes(folder, compiled.program)
    weights = tuple(_weight(row, sizes) for row in rows)
    reason = _why_no_kl(recipe, watch)
    if reason:
        return Quantization(weights, kl_absent=reason)
    measured = _measure(recipe, watch, folder)
    if isinstance(measured, str):
        return Quantization(weights, kl_absent=measured)
    return Quantization(tuple(replace(w, kl=measured.kl.get(w.name)) for w in weights), measured.measurement)


def _weight(row: Mapping[str, Any], sizes: Mapping[str, int]) -> QuantizedWeight:
    known = {"block_size": 0, "symmetric": True} | {key: value for key, value in row.items() if key in _FIELDS}
    known["activations"] = _words(row["activations"]) if "activations" in row else ""
    return QuantizedWeight(**known, stored_bytes=sizes.get(row["tensor"].removesuffix(".q")))


def _words(activations: Mapping[str, Any]) -> str:
    keys = [field.name for field in fields(ActivationScheme)]
    return ActivationScheme(**{key: activations[key] for key in keys if key in activations}).words


def _why_no_kl(recipe: Recipe, watch: WeightWatch) -> str:
    """Why the KL of single weights is not measured; "" when it is."""
    if recipe.evaluation is None:
        return "the recipe has no evaluation text"
    if recipe.evaluation.layer_kl_tokens == 0:
        return "evaluation.layer_kl_tokens is 0"
    if watch.before is None or watch.after is None:
        return "the passes quantized no weight of a linear layer or embedding"
    if watch.changed_by:
        return f"{watch.changed_by} changed weights when others were quantized already"
    return ""


def _measure(recipe: Recipe, watch: WeightWatch, folder: Path) -> LayerKl | str:
    evaluation, text = recipe.evaluation, recipe.evaluation_text()
    assert evaluation is not None
    assert text is not None
    assert watch.before is not None
    assert watch.after is not None
    options = KlOptions(text, evaluation.window_tokens, evaluation.tokens, evaluation.layer_kl_tokens, recipe.threads)
    found = layer_kl(watch.before, quantized_weights(watch.before, watch.after), folder / "tokenizer", options)
    watch.forget()
    return found
