"""Evidence that the passes of a build leave: figures of each quantized weight, and the facts that passes recorded.

QuantizationObserver keeps the graph from just before the first quantization and the one after the last. The copies
share their tensors with the model; most are memory-mapped. layer_kl.py measures the KL between the two graphs.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ingot.builder.layer_kl import KlOptions, LayerKl, layer_kl, quantized_weights
from ingot.passes.manager import PassRecord
from ingot.passes.weights import weight_sites
from ingot.pipeline.checkpoint.formats.activations import InputScheme
from ingot.pipeline.compile import Compiled, Observer
from ingot.pipeline.recipe.schema import Recipe
from ingot.runtime import Tokenizer
from ingot.validation.quantization import Quantization, WeightFigures

PASSES_FILE = "passes.json"
_FIELDS = {field.name for field in fields(WeightFigures)}


class QuantizationObserver:
    """An observer of passes that keeps the graphs before and after quantization, and then calls `then`.

    before, after    the model before its first weight was quantized, and after its last; None until a pass quantizes
    changed_by       a pass that changed weights when others were quantized already, so that `before` and `after`
                     differ in more than rounding; "" without one
    """

    def __init__(self, start: Callable[[], ir.Model], then: Observer | None = None) -> None:
        """`start` returns the model before the first pass."""
        self.before: ir.Model | None = None
        self.after: ir.Model | None = None
        self.changed_by = ""
        self._start = start
        self._then = then
        self._last: ir.Model | None = None
        self._num_quantized = 0

    def __call__(self, model: ir.Model, record: PassRecord) -> None:
        """Record the model after a pass."""
        if record.pass_.kind != "lowering":
            self._record(model, record)
        if self._then is not None:
            self._then(model, record)

    def _record(self, model: ir.Model, record: PassRecord) -> None:
        if self._last is None:
            self._last = self._start()
            self._num_quantized = _num_quantized(self._last)
        now = _num_quantized(model)
        if now > self._num_quantized:
            self.before = self.before or self._last
        if self.before and record.modified and record.pass_.changes_weights:
            self.changed_by = record.name
        # A lowering replaces quantized weights by its engine's own nodes.
        if now >= self._num_quantized and record.modified:
            self._num_quantized, self._last = now, model.clone()
            self.after = self._last if self.before else None

    def release(self) -> None:
        """Drop the copies of the model."""
        self.before = self.after = self._last = None


def _num_quantized(model: ir.Model) -> int:
    return sum(site.is_quantized for site in weight_sites(model))


def write_pass_facts(facts: Mapping[str, Any], folder: Path) -> None:
    """Write the facts by pass name to `folder`/passes.json; without facts, write nothing."""
    if facts:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / PASSES_FILE).write_text(json.dumps(facts, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def quantization_of(recipe: Recipe, compiled: Compiled, observer: QuantizationObserver, folder: Path) -> Quantization:
    """Return figures of a compiled program's quantized weights, with KL if the recipe measures it.

    folder    the staging folder, which holds the tokenizer
    """
    if not compiled.weights:
        return Quantization()
    weights = tuple(_weight(row, compiled.written.weight_bytes) for row in compiled.weights)
    reason = _why_no_kl(recipe, observer)
    if reason:
        return Quantization(weights, kl_absent=reason)
    measured = _measure(recipe, observer, folder)
    if isinstance(measured, str):
        return Quantization(weights, kl_absent=measured)
    return Quantization(tuple(replace(w, kl=measured.kl.get(w.name)) for w in weights), measured.measurement)


def _weight(row: Mapping[str, Any], sizes: Mapping[str, int]) -> WeightFigures:
    known = {"block_size": 0, "symmetric": True} | {key: value for key, value in row.items() if key in _FIELDS}
    known["activations"] = _words(row["activations"]) if "activations" in row else ""
    return WeightFigures(**known, stored_bytes=sizes.get(row["tensor"]))


def _words(activations: Mapping[str, Any]) -> str:
    keys = [field.name for field in fields(InputScheme)]
    return InputScheme(**{key: activations[key] for key in keys if key in activations}).words


def why_unmeasured(recipe: Recipe) -> str:
    """Return why the recipe measures no KL of single weights, or ""."""
    if recipe.evaluation is None:
        return "the recipe has no evaluation text"
    return "evaluation.layer_kl_tokens is 0" if recipe.evaluation.layer_kl_tokens == 0 else ""


def _why_no_kl(recipe: Recipe, observer: QuantizationObserver) -> str:
    """Return why the KL of single weights is not measured, or ""."""
    if reason := why_unmeasured(recipe):
        return reason
    if observer.before is None or observer.after is None:
        return "the passes quantized no weight of a linear layer or embedding"
    if observer.changed_by:
        return f"{observer.changed_by} changed weights when others were quantized already"
    return ""


def _measure(recipe: Recipe, observer: QuantizationObserver, folder: Path) -> LayerKl | str:
    evaluation, text = recipe.evaluation, recipe.evaluation_text()
    assert evaluation is not None
    assert text is not None
    assert observer.before is not None
    assert observer.after is not None
    options = KlOptions(text, evaluation.window_tokens, evaluation.tokens, evaluation.layer_kl_tokens, recipe.threads)
    weights = quantized_weights(observer.before, observer.after)
    found = layer_kl(observer.before, weights, partial(Tokenizer.load, folder / "tokenizer"), options)
    observer.release()
    return found
