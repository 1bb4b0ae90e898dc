"""Lowered programs have the logits of the IR: all families, all forms of weights, ragged batches."""

from pathlib import Path

import pytest

from tests.parity import CHECKPOINTS, compare
from tests.simulators.cpu_programs import PACKED, Entry, both_logits, imported
from tests.tolerances import within

FAMILIES = sorted(path.parent.name for path in CHECKPOINTS.glob("*/config.json"))
FORMS: dict[str, Entry] = {
    "2 bits": ("quantize-weights", {"bits": 2, "block_size": 32, "symmetric": False}),
    "3 bits": ("quantize-weights", {"bits": 3, "block_size": 32}),
    "4 bits": ("quantize-weights", {"bits": 4, "block_size": 32}),
    "4 bits, zero points": ("quantize-weights", {"bits": 4, "block_size": 16, "symmetric": False}),
    "8 bits per channel": ("quantize-weights", {"bits": 8, "block_size": 0}),
    "float8": ("fp8", {}),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("is_packed", [False, True], ids=["separate", "packed"])
def test_a_program_of_floats_has_the_logits_of_the_ir(family: str, is_packed: bool, tmp_path: Path) -> None:
    model = imported(CHECKPOINTS / family, *(PACKED if is_packed else ()))
    ours, theirs = both_logits(model, tmp_path)
    parity = compare(ours, theirs)
    assert within("parity.float32", parity.worst, scale=max(1.0, parity.largest / 4))


@pytest.mark.parametrize("form", FORMS)
def test_a_program_of_quantized_weights_has_the_logits_of_the_ir(form: str, tmp_path: Path) -> None:
    """With activations that are not rounded: rounding is the kernels' own, and the IR has none."""
    model = imported(CHECKPOINTS / "llama", *PACKED, FORMS[form])
    parity = compare(*both_logits(model, tmp_path))
    assert within("parity.float32", parity.worst, scale=max(1.0, parity.largest / 4))
