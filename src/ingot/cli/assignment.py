"""What mixed-precision chose, printed when it has: each weight's scheme, what it costs, and what it could have had."""

import json
from collections.abc import Mapping

import onnx_ir as ir

from ingot.cli.console import print_note, print_table
from ingot.passes.manager import PassRecord
from ingot.passes.quantization.bit_assignment import assignment_table
from ingot.passes.quantization.mixed_precision import MIXED_KEY, MixedPrecision
from ingot.validation.result import Evidence


def print_assignment(model: ir.Model, record: PassRecord) -> None:
    """A table behind the pass mixed-precision; nothing behind any other."""
    if record.name == MixedPrecision.name:
        header, *rows = assignment_table(json.loads(model.metadata_props[MIXED_KEY]))
        print_table("Mixed precision: KL in nats per token, of each weight alone", header, rows)


def note_prediction(facts: Mapping[str, str], evidence: Evidence | None) -> None:
    """The predicted KL beside the measured one, where there are both."""
    measured = None if evidence is None else evidence.measured.get("kl_mean")
    if MIXED_KEY not in facts or measured is None:
        return
    predicted = json.loads(facts[MIXED_KEY])["predicted_kl"]
    print_note(
        f"mixed-precision predicted a KL of {predicted:.4g} of its weights on the calibration text; the whole artifact "
        f"has {measured.estimate.value:.4g} on the evaluation text"
    )
