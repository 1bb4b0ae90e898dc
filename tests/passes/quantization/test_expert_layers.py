"""Calibrated passes on a mixture of experts: each expert has the rows routed to it; with too few it has no data."""

import logging
from statistics import median
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from ingot.errors import PassError
from ingot.passes.calibration import calibrate_with
from ingot.passes.manager import PassManager
from ingot.passes.quantization.quantize_weights import QUANTIZATION_FACTS
from ingot.passes.registry import make_pass
from ingot.pipeline.calibrate import CalibrationEngine
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.model.importer import import_checkpoint
from tests.parity import CHECKPOINTS
from tests.passes.calibration_data import calibration_data
from tests.reference_runner import ReferenceRunner

SEQUENCES, TOKENS, CHOSEN = 6, 20, 3  # the fixture's experts per token
FOUR_BITS = {"bits": 4, "block_size": 16}


def mixture() -> ir.Model:
    return import_checkpoint(Checkpoint.open(CHECKPOINTS / "qwen3_moe"))


def service(expert_tokens: int = 1) -> CalibrationEngine:
    return CalibrationEngine(calibration_data(SEQUENCES, TOKENS, 128), expert_tokens=expert_tokens)


def run(model: ir.Model, engine: CalibrationEngine, *passes: tuple[str, dict[str, Any]]) -> ir.Model:
    with calibrate_with(engine):
        PassManager([make_pass(*one) for one in passes]).run(model)
    return model


def experts(model: ir.Model) -> dict[str, dict[str, Any]]:
    """Statistics of the gate projections of the experts."""
    rows = QUANTIZATION_FACTS.of(model).weights
    return {row["name"]: row for row in rows if ".experts." in row["name"] and "gate_proj" in row["name"]}


def test_the_service_computes_the_models_logits() -> None:
    data = calibration_data(SEQUENCES, TOKENS, 128)
    found = np.concatenate(list(CalibrationEngine(data).logits(mixture())))
    sequences = [chunk.tolist() for chunk in data.sequences]
    expected = ReferenceRunner(mixture()).run_ragged(sequences[:3], [(TOKENS,) * 3])
    np.testing.assert_allclose(found[: 3 * TOKENS], np.concatenate(expected), atol=1e-5)


def test_gptq_counts_the_tokens_of_each_expert_and_leaves_those_with_too_few() -> None:
    counts = {name: row["tokens"] for name, row in experts(run(mixture(), service(), ("gptq", FOUR_BITS))).items()}
    assert sum(counts.values()) == CHOSEN * SEQUENCES * TOKENS
    floor = int(median(counts.values())) + 1
    methods = experts(run(mixture(), service(floor), ("gptq", FOUR_BITS)))
    for name, tokens in counts.items():
        reason = f"{tokens} calibration tokens reach it, fewer than {floor}"
        expected = ("gptq", None) if tokens >= floor else ("round-to-nearest", reason)
        assert (methods[name]["method"], methods[name].get("reason")) == expected
    assert {row["method"] for row in methods.values()} == {"gptq", "round-to-nearest"}


def test_the_warning_names_the_experts(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "ingot.pipeline"):
        run(mixture(), service(10_000), ("gptq", FOUR_BITS))
    (message,) = caplog.messages
    assert message.startswith("calibration: fewer than 10,000 tokens are routed to layers.0.mlp.experts.0.gate_proj (")
    assert "these experts are rounded to nearest. Raise calibration.sequences, or lower" in message


def test_a_static_scale_without_data_is_refused() -> None:
    with pytest.raises(PassError, match=r"experts\.0\.gate_proj' has no data for a static scale: .* fewer than 10,000"):
        run(mixture(), service(10_000), ("quantize-activations", {"mode": "static"}))


@pytest.mark.parametrize("floor", [1, 10_000])
@pytest.mark.parametrize(
    "name", ["awq", "smooth-quant", "mixed-precision", "quantize-activations", "prune-weights"]
)  # fmt: skip
def test_other_passes_run_and_routers_stay_floats(name: str, floor: int) -> None:
    options: dict[str, Any] = {"mixed-precision": {"bits": [4, 8], "block_sizes": [16]}}.get(name, {})
    rounds = [] if name in ("smooth-quant", "prune-weights") else [("quantize-weights", FOUR_BITS)]
    model = run(mixture(), service(floor), (name, options), *rounds)
    (router,) = (node for node in model.graph if node.name == "layers.0.mlp.router")
    weight = router.inputs[1]
    assert weight is not None
    producer = weight.producer()
    assert producer is None or producer.op_type == "Cast"
