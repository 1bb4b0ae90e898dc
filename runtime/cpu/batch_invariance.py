"""Batch invariance of segments on this CPU: the padding that makes a row's result independent of the other rows.

onnxruntime chooses matmul kernels by instruction set and row count. Where a row's last bits depend on the count,
padding the rows to a multiple can make them equal again (4-bit weights in blocks of 64: even counts). At start-up the
segments run on seeded rows, and the smallest multiple that gives equal bits is chosen.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ingot.artifact import ModelFacts
from ingot.runtime.cpu.buffers import SegmentBuffer, ValueBuffers
from ingot.runtime.cpu.segment_runner import SegmentRunner
from ingot.sizes import round_up

_log = logging.getLogger(__name__)

MULTIPLES = (1, 2, 4, 8, 16)
"""Multiples to try, smallest first; buffers hold a multiple of the last."""

_FEW = ((0, 1), (0, 2), (0, 3), (0, 4))
_MANY = (*_FEW, (0, 5), (0, 7), (0, 8), (0, 16), (0, 33), (5, 7), (31, 1))
"""Runs as (first row, number of rows) of the reference's rows."""

_REFERENCE_ROWS = 64


@dataclass(frozen=True)
class RowFinding:
    """Result of the check. `reason` is a sentence for the log."""

    row_multiple: int
    batch_invariant: bool
    reason: str


def find_row_multiple(runners: Sequence[SegmentRunner], buffers: ValueBuffers, model: ModelFacts) -> RowFinding:
    """Find the smallest row multiple that makes every segment's rows independent of each other.

    The first two segments and the last run at many row counts, the others (which differ in weights only) at a few.
    Leaves random values in the buffers.
    """
    probes = [_Probe(runner, buffers, model, _runs(index, len(runners))) for index, runner in enumerate(runners)]
    reason = ""
    for multiple in MULTIPLES:
        refusals = (probe.refusal(multiple) for probe in probes)
        refusal = next(filter(None, refusals), "")
        if not refusal:
            finding = RowFinding(multiple, True, reason or "rows are independent of their number without padding")
            _log.info("rows are padded to a multiple of %d: %s", multiple, finding.reason)
            return finding
        reason = refusal
    finding = RowFinding(1, False, f"no padding makes rows independent of their number: {reason}")
    _log.warning("results may depend on the batch in their last bits: %s", finding.reason)
    return finding


def _runs(index: int, count: int) -> tuple[tuple[int, int], ...]:
    return _MANY if index in (0, 1, count - 1) else _FEW


class _Probe:
    """One segment, its seeded inputs and its reference outputs."""

    def __init__(
        self, runner: SegmentRunner, buffers: ValueBuffers, model: ModelFacts, runs: tuple[tuple[int, int], ...]
    ) -> None:
        self._runner, self._buffers = runner, buffers
        wanted = _REFERENCE_ROWS if runs is _MANY else MULTIPLES[-1]
        rows = min(wanted, buffers.token_rows, buffers.logits_rows)
        self._runs = [(first, count) for first, count in runs if first + count <= rows]
        rng = np.random.default_rng(0)
        self._inputs = {name: _seeded(rng, name, buffers[name], rows, model) for name in runner.step.inputs}
        self._reference = self._run(0, rows, rows)

    def refusal(self, multiple: int) -> str:
        """Describe the first difference from the reference with rows padded to `multiple`; empty for none."""
        for first, count in self._runs:
            outputs = self._run(first, count, round_up(count, multiple))
            for name, output in outputs.items():
                expected = self._reference[name][first : first + count]
                if output[:count].tobytes() != expected.tobytes():
                    worst = np.abs(output[:count] - expected).max()
                    file = self._runner.step.file
                    return f"{file} with {round_up(count, multiple)} rows differs from itself by {worst:.1e} in {name}"
        return ""

    def _run(self, first: int, count: int, rows: int) -> dict[str, SegmentBuffer]:
        """Run rows first .. first + count, followed by zeros up to `rows`; return copies of the outputs."""
        for name, values in self._inputs.items():
            buffer = self._buffers[name]
            buffer[:count] = np.arange(count) if name == "logits_indices" else values[first : first + count]
            buffer[count:rows] = 0
        self._runner.bind(rows, rows)()
        return {name: self._buffers[name][:rows].copy() for name in self._runner.step.outputs}


def _seeded(rng: np.random.Generator, name: str, buffer: SegmentBuffer, rows: int, model: ModelFacts) -> SegmentBuffer:
    """Make random rows for an input: token ids, positions, or normally distributed activations."""
    shape = (rows, *buffer.shape[1:])
    if np.issubdtype(buffer.dtype, np.integer):
        limits = {"input_ids": model.vocab_size, "position_ids": model.context_tokens}
        return rng.integers(0, limits.get(name, rows), shape)
    if buffer.dtype == np.float16:
        return rng.standard_normal(shape).astype(np.float16)
    return rng.standard_normal(shape, dtype=np.float32)
