"""Checks of the values of quantized weights, for every reader of a checkpoint: a build, a transcoding, a lint.

    scales         of zero: their weights are lost
    zero points    GPTQ zero points that are off by one, or beyond the codes
    g_idx          out of order although desc_act is false

To add a check: a generator of problems, and its line in `value_problems`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from ingot.errors import CheckpointError, shown
from ingot.pipeline.checkpoint.formats.codes import FloatArray
from ingot.pipeline.checkpoint.formats.decoded import DecodedWeight, EncodedTensor
from ingot.progress import note

_OTHER_VERSION = {"gptq": "gptq_v2", "gptq_v2": "gptq"}
# Codes less zero points average to 0 in a trained layer, and to -1 or 1 if the zero points are off by one.
_OFF_BY_ONE = 0.5


@dataclass(frozen=True)
class ValueProblem:
    """A problem of one weight. An error makes every value wrong, or is one to other loaders; `kind` groups them."""

    severity: Literal["error", "warning"]
    kind: str
    message: str


@dataclass
class EncodedValues:
    """The values of one checkpoint's quantized weights: errors are raised at once, warnings noted at the end."""

    quantization: Mapping[str, Any]
    _warned: dict[str, list[str]] = field(default_factory=dict)

    def read(self, tensor: EncodedTensor) -> DecodedWeight | FloatArray:
        """Return the weight. CheckpointError for an error of its values, and as `EncodedTensor.read`."""
        content = tensor.read()
        if not isinstance(content, DecodedWeight):
            return content
        for problem in value_problems(content, self.quantization):
            text = f"{shown(tensor.name)}: {problem.message}"
            if problem.severity == "error":
                raise CheckpointError(
                    f"{tensor.file}: {text}. Correct the quantization_config, or use another checkpoint "
                    "(ingot lint-checkpoint lists every problem)"
                )
            self._warned.setdefault(problem.kind, []).append(text)
        return content

    def note_warnings(self) -> None:
        """Note the first warning of each kind, and how many more weights have it."""
        for first, *others in self._warned.values():
            more = f" (and {len(others)} more of the kind: ingot lint-checkpoint lists them)" if others else ""
            note(f"the checkpoint's {first}{more}")
        self._warned.clear()


def value_problems(weight: DecodedWeight, quantization: Mapping[str, Any]) -> Iterator[ValueProblem]:
    """Return the problems of a weight that has been read."""
    zeros = int(np.count_nonzero(weight.scales == 0))
    if zeros:
        message = f"{zeros} of {weight.scales.size} scales are 0: their weights are lost"
        yield ValueProblem("warning", "scales of 0", message)
    if weight.zero_points is not None and quantization.get("quant_method") == "gptq":
        yield from _zero_points(weight, quantization)
    if weight.g_idx is not None and quantization.get("desc_act") is False:
        message = "g_idx puts columns into groups out of order, but desc_act is false: some loaders ignore g_idx"
        yield ValueProblem("error", "g_idx", message)


def _zero_points(weight: DecodedWeight, quantization: Mapping[str, Any]) -> Iterator[ValueProblem]:
    assert weight.zero_points is not None
    said = quantization.get("checkpoint_format")
    declared = said or "gptq"
    says = f"checkpoint_format says {declared}" if said else "checkpoint_format is absent, which means gptq"
    middle, points = 1 << (quantization["bits"] - 1), weight.zero_points
    lowest, highest = int(points.min()), int(points.max())
    if quantization.get("sym") and (lowest, highest) in ((middle - 1,) * 2, (middle + 1,) * 2):
        stored = f"its zero points are {lowest}, but sym means {middle}: they are stored as {_OTHER_VERSION[declared]}"
        yield ValueProblem("error", "version", f"{stored} stores them, and {says}")
        return
    if quantization.get("sym") and (lowest, highest) != (middle, middle):
        message = f"sym means zero points of {middle}, but they go from {lowest} to {highest}"
        yield ValueProblem("warning", "sym", message)
    yield from _convention(weight, declared, says)
    beyond = int(np.count_nonzero(points >= 2 * middle))
    if beyond:
        message = (
            f"{beyond} of {points.size} zero points are {2 * middle}, beyond the codes: gptq cannot store a "
            "zero point of 0, and reads it as that"
        )
        yield ValueProblem("warning", "beyond the codes", message)


def _convention(weight: DecodedWeight, declared: str, says: str) -> Iterator[ValueProblem]:
    """Guess the version of the zero points from the mean difference between codes and zero points."""
    assert weight.zero_points is not None
    per_group = np.bincount(weight.groups_of_columns, minlength=weight.scales.shape[1])
    zeros = float((weight.zero_points.astype(np.float64) * per_group).sum()) / weight.codes.size
    mean = float(weight.codes.mean(dtype=np.float64)) - zeros
    wrong_side = -1 if declared == "gptq" else 1  # the wrong version reads zero points off by one
    if abs(mean - wrong_side) < _OFF_BY_ONE:
        message = (
            f"its codes are {mean:+.2f} from their zero points on average, as if these were stored as "
            f"{_OTHER_VERSION[declared]} stores them; {says}"
        )
        yield ValueProblem("warning", "mean of zero points", message)
