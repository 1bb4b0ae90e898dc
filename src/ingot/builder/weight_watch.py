"""Watches a build's passes for the model just before its weights are quantized, and just after.

Kept are copies of the graphs alone: their tensors are the model's own, most of them still in the checkpoint's file.
"""

from collections.abc import Callable

import onnx_ir as ir

from ingot.passes.manager import PassRecord
from ingot.passes.registry import load_pass_class
from ingot.passes.weight_sites import weight_sites
from ingot.pipeline.compile import Observer

_EXACT = ("clean-up", "fusion")
_KEEPS_WEIGHTS = ("round-scales", "quantize-activations", "mixed-precision")  # these scale and rotate nothing
_SCALES_TOO = ("smooth-quant",)  # scales channels and rounds weights in one


class WeightWatch:
    """An observer of passes; passes its calls on to `then`.

    before, after    the model without and with the weights that the build quantizes; None until there are any
    changed_by       a pass that changed weights when some were quantized already, or while it quantized them: what the
                     two differ in is then more than rounding
    """

    def __init__(self, start: Callable[[], ir.Model], then: Observer | None = None) -> None:
        """`start` imports the model anew, as it was before the first pass."""
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
        kind = load_pass_class(record.name).kind
        if kind == "lowering":
            return
        if self._last is None:
            self._last = self._start()
            self._quantized = _num_quantized(self._last)
        now = _num_quantized(model)
        if now > self._quantized:
            self.before = self.before or self._last
            self.changed_by = record.name if record.name in _SCALES_TOO else self.changed_by
        elif self.before and record.modified and kind not in _EXACT and record.name not in _KEEPS_WEIGHTS:
            self.changed_by = record.name
        if now >= self._quantized:  # a lowering takes them away
            self._quantized, self._last = now, model.clone()
            self.after = self._last if self.before else None

    def forget(self) -> None:
        """Let go of the copies."""
        self.before = self.after = self._last = None


def _num_quantized(model: ir.Model) -> int:
    return sum(site.is_quantized for site in weight_sites(model))
