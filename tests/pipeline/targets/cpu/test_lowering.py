"""Lowered programs have the logits of the IR: all families, all forms of weights, ragged batches."""

from pathlib import Path

import numpy as np
import pytest

from ingot.errors import PassError
from tests.each_case import each_case
from tests.oracle.cases import CASES
from tests.parity import CHECKPOINTS, compare
from tests.simulators.cpu_programs import PACKED, Entry, both_logits, imported, lowered
from tests.tolerances import within

DENSE = ("cohere2", "gpt_neox", "stablelm")  # parallel blocks with one norm and two, LayerNorm
FAMILIES = sorted([*(case.name for case in CASES), *DENSE])
FORMS: dict[str, Entry] = {
    "2 bits": ("quantize-weights", {"bits": 2, "block_size": 32, "symmetric": False}),
    "3 bits": ("quantize-weights", {"bits": 3, "block_size": 32}),
    "4 bits": ("quantize-weights", {"bits": 4, "block_size": 32}),
    "4 bits, zero points": ("quantize-weights", {"bits": 4, "block_size": 16, "symmetric": False}),
    "8 bits per channel": ("quantize-weights", {"bits": 8, "block_size": 0}),
    "float8": ("fp8", {}),
}


@each_case("family", FAMILIES)
@each_case("is_packed", [False, True], ids=["separate", "packed"])
def test_a_program_of_floats_has_the_logits_of_the_ir(family: str, is_packed: bool, tmp_path: Path) -> None:
    model = imported(CHECKPOINTS / family, *(PACKED if is_packed else ()))
    ours, theirs = both_logits(model, tmp_path)
    parity = compare(ours, theirs)
    assert within("parity.float32", parity.worst, scale=max(1.0, parity.largest / 4))


@each_case("form", FORMS)
def test_a_program_of_quantized_weights_has_the_logits_of_the_ir(form: str, tmp_path: Path) -> None:
    """With activations that are not rounded: rounding is the kernels' own, and the IR has none."""
    model = imported(CHECKPOINTS / "llama", *PACKED, FORMS[form])
    parity = compare(*both_logits(model, tmp_path))
    assert within("parity.float32", parity.worst, scale=max(1.0, parity.largest / 4))


CHANNEL = {"bits": 8, "block_size": 0, "embedding": "none"}
ROUNDED: dict[str, tuple[Entry, ...]] = {
    "token": (("quantize-activations", {}), ("quantize-weights", CHANNEL)),
    "token, zero points": (("quantize-activations", {}), ("quantize-weights", {**CHANNEL, "symmetric": False})),
    "token, blocks": (("quantize-activations", {}), ("quantize-weights", {"bits": 4, "block_size": 32})),
}


@pytest.mark.parametrize("form", ROUNDED)
def test_activations_that_a_pass_rounded_have_the_logits_of_the_ir(form: str, tmp_path: Path) -> None:
    """A value at the border of two codes may take the other one: sums of norms differ in their last bits."""
    ours, theirs = both_logits(imported(CHECKPOINTS / "llama", *PACKED, *ROUNDED[form]), tmp_path)
    error = max(float(np.linalg.norm(o - t) / np.linalg.norm(t)) for o, t in zip(ours, theirs, strict=True))
    assert within("segments.activations", error)


@pytest.mark.parametrize("form", ["3 bits", "4 bits, zero points", "8 bits per channel"])
def test_rounded_activations_are_close_to_exact_ones(form: str, tmp_path: Path) -> None:
    model = imported(CHECKPOINTS / "llama", *PACKED, FORMS[form])
    ours, theirs = both_logits(model, tmp_path, rounds=True)
    error = max(float(np.linalg.norm(o - t) / np.linalg.norm(t)) for o, t in zip(ours, theirs, strict=True))
    assert error > 0
    assert within("quantized.int8", error)


@pytest.mark.parametrize(
    ("name", "passes", "message"),
    [
        ("llama", [("fp8", {"activations": "dynamic"})], r"qkv_proj' \(Gemm\) has float8 activations before float8"),
        ("llama", [("quantize-activations", {})], r"qkv_proj' \(Gemm\) has int8 activations before float32 weights"),
        ("gemma2", ["attention-reference"], r"attention.reference.slots' \(Unsqueeze\) moves elements between rows"),
    ],
)
def test_a_node_without_an_operation_is_refused_by_name(name: str, passes: list[Entry], message: str) -> None:
    with pytest.raises(PassError, match=message):
        lowered(imported(CHECKPOINTS / name, *PACKED, *passes))


def test_an_operator_without_an_operation_is_refused_by_name() -> None:
    model = imported(CHECKPOINTS / "apertus", *PACKED)
    node = next(node for node in model.graph if node.op_type == "Elu")
    node.op_type = "Erf"
    node.attributes.clear()
    with pytest.raises(
        PassError, match=r"'layers.0.mlp.xielu.\w+' \(\w+\) has no operation on the CPU; there are operations"
    ):
        lowered(model)
