"""A failed gate on accuracy names the part that explains it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ingot.artifact import GateOutcome
from ingot.builder import gate_causes
from ingot.builder.gate_causes import failure_cause, parts_of
from ingot.errors import PassError
from ingot.pipeline.recipe.load import load_recipe
from tests.data_paths import FIXTURES

TINY = f"checkpoint={FIXTURES / 'checkpoints' / 'llama'}"
INT4_KEYS = "passes.quantize-kv-cache.precision=int4"
FOLDERS = (Path("candidate"), Path("baseline"))


def gate(name: str, verdict: str = "FAIL", *, advisory: bool = False) -> GateOutcome:
    return GateOutcome.model_validate(
        {"name": name, "verdict": verdict, "measured": 0.04, "low": 0.03, "high": 0.05, "limit": 0.01,
         "bound": "max", "advisory": advisory}
    )  # fmt: skip


def evidence(*gates: GateOutcome, weights: tuple[float | None, ...] = ()) -> Any:
    """Evidence with a KL divergence of 0.04, and that of some weights alone."""
    measured = {"kl_mean": SimpleNamespace(estimate=SimpleNamespace(value=0.04))}
    quantization = SimpleNamespace(weights=[SimpleNamespace(kl=kl) for kl in weights])
    return SimpleNamespace(gates=gates, measured=measured, notes=SimpleNamespace(quantization=quantization))


def compiled(seconds: float) -> Any:
    return SimpleNamespace(passes=[SimpleNamespace(seconds=seconds)])


def test_the_parts_of_a_recipe_are_those_whose_passes_round_or_prune() -> None:
    assert list(parts_of(load_recipe("int4-cpu", [TINY]))) == ["weights", "KV cache"]
    assert list(parts_of(load_recipe("w8a8-cpu", [TINY]))) == ["weights with activations", "KV cache"]
    assert parts_of(load_recipe("fp32-cpu", [TINY])) == {}


def test_the_part_whose_removal_takes_most_away_is_named_first(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe("int4-cpu", [TINY, INT4_KEYS])

    def measured_again(rest: Any, *_: object) -> float:
        return 0.038 if "quantize-kv-cache" in [entry.make().name for entry in rest.passes] else 0.002

    monkeypatch.setattr(gate_causes, "_sample_of", lambda recipe: None)
    monkeypatch.setattr(gate_causes, "measure", lambda *_: evidence())
    monkeypatch.setattr(gate_causes, "_kl_of", measured_again)
    found = failure_cause(evidence(gate("kl_mean")), recipe, compiled(1.0), None, FOLDERS)  # type: ignore[arg-type]
    assert found == (
        "Put back to 16 bits, each of these takes away of the KL divergence: KV cache 95 %, weights 5 %;"
        " give quantize-kv-cache more bits, or leave it out"
    )


def test_a_part_that_cannot_be_left_out_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(rest: Any, *_: object) -> float:
        if "quantize-weights" not in [entry.make().name for entry in rest.passes]:
            raise PassError("no weight is left")
        return 0.02

    monkeypatch.setattr(gate_causes, "_sample_of", lambda recipe: None)
    monkeypatch.setattr(gate_causes, "measure", lambda *_: evidence())
    monkeypatch.setattr(gate_causes, "_kl_of", fails)
    recipe = load_recipe("int4-cpu", [TINY])
    found = failure_cause(evidence(gate("kl_mean")), recipe, compiled(1.0), None, FOLDERS)  # type: ignore[arg-type]
    assert found
    assert "KV cache 50 %;" in found


def test_where_a_build_takes_long_the_weights_alone_decide() -> None:
    recipe = load_recipe("int4-cpu", [TINY])
    failed = gate("top1_agreement")
    slow: Any = compiled(10_000.0)
    nothing: Any = None
    little = failure_cause(evidence(failed, weights=(0.001, 0.003)), recipe, slow, nothing, FOLDERS)
    assert little == "Of the KL divergence weights explain 10 %: look at the other parts"
    much = failure_cause(evidence(failed, weights=(0.02, None, 0.018)), recipe, slow, nothing, FOLDERS)
    assert much
    assert "weights 95 %" in much
    assert failure_cause(evidence(failed), recipe, slow, nothing, FOLDERS) is None


def test_other_gates_have_no_such_cause() -> None:
    recipe, quick = load_recipe("int4-cpu", [TINY]), compiled(1.0)
    nothing: Any = None
    for gates in ((gate("size_ratio"),), (gate("kl_mean", "PASS"),), (gate("kl_mean", advisory=True),), ()):
        assert failure_cause(evidence(*gates), recipe, quick, nothing, FOLDERS) is None
