"""Notes of a build as evidence: statistics, stored bytes and KL of each quantized weight, and the facts of passes.

WeightWatch keeps the graph from just before the first quantization and the one after the last; their tensors are the
model's own, most of them still in the checkpoint's file. KL is measured between the two, by layer_kl.py.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ingot.builder.layer_kl import KlOptions, LayerKl, layer_kl, quantized_weights
from ingot.passes.manager import PassRecord
from ingot.passes.weights import weight_sites
from ingot.pipeline.checkpoint.formats.activations import ActivationScheme
from ingot.pipeline.compile import Compiled, Observer
from ingot.pipeline.recipe.schema import Recipe
from ingot.validation.quantization import Quantization, WeightFigures


class WeightWatch:
    """An observer of passes that keeps the graphs before and after quantization; it calls `then` too.

    before, after    the model without and with the weights that the build quantizes; None until there are any
    changed_by       a pass that changed weights when or after others were quantized, so that `before` and `after`
                     differ in more than rounding; "" if there was none
    """

    def __init__(self, start: Callable[[], ir.Model], then: Observer | None = None) -> None:
        """`start` makes the model as it was before the first pass."""
        self.before: ir.Model | None = None
        self.after: ir.Model | None = None
        self.changed_by = ""
        self._start = start
        self._then = then
        self._last: ir.Model | None = None
        self._quantized = 0

    def __call__(self, model: ir.Model, record: PassRecord) -> None:
        """Called after every pass, with the model as it is."""
        self._look(model, record)
        if self._then is not None:
            self._then(model, record)

    def _look(self, model: ir.Model, record: PassRecord) -> None:
        if record.pass_.kind == "lowering":
            return
        if self._last is None:
            self._last = self._start()
            self._quantized = _num_quantized(self._last)
        now = _num_quantized(model)
        if now > self._quantized:
            self.before = self.before or self._last
        if self.before and record.modified and record.pass_.changes_weights:
            self.changed_by = record.name
        if now >= self._quantized:  # a lowering takes them away
            self._quantized, self._last = now, model.clone()
            self.after = self._last if self.before else None

    def forget(self) -> None:
        """Let go of the copies."""
        self.before = self.after = self._last = None


def _num_quantized(model: ir.Model) -> int:
    return sum(site.is_quantized for site in weight_sites(model))


PASSES_FILE = "passes.json"


def write_pass_facts(facts: Mapping[str, Any], folder: Path) -> None:
    """Write the facts of passes, by name, to passes.json in `folder`, made if missing; do nothing without facts."""
    if facts:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / PASSES_FILE).write_text(json.dumps(facts, indent=2, sort_keys=True) + "\n", encoding="utf-8")


_FIELDS = {field.name for field in fields(WeightFigures)}


def quantization_of(recipe: Recipe, compiled: Compiled, watch: WeightWatch, folder: Path) -> Quantization:
    """Figures of the quantized weights of a program compiled into `folder`, with KL if the recipe measures it."""
    if not compiled.weights:
        return Quantization()
    weights = tuple(_weight(row, compiled.written.weight_bytes) for row in compiled.weights)
    reason = _why_no_kl(recipe, watch)
    if reason:
        return Quantization(weights, kl_absent=reason)
    measured = _measure(recipe, watch, folder)
    if isinstance(measured, str):
        return Quantization(weights, kl_absent=measured)
    return Quantization(tuple(replace(w, kl=measured.kl.get(w.name)) for w in weights), measured.measurement)


def _weight(row: Mapping[str, Any], sizes: Mapping[str, int]) -> WeightFigures:
    known = {"block_size": 0, "symmetric": True} | {key: value for key, value in row.items() if key in _FIELDS}
    known["activations"] = _words(row["activations"]) if "activations" in row else ""
    return WeightFigures(**known, stored_bytes=sizes.get(row["tensor"]))


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
