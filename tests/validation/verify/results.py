"""Results of verifications for tests of what is made of them."""

from ingot.validation.verify import CellResult, VerifyResult

REPEAT = "ingot verify demo --quick --only"


def sample_result(*wrong: CellResult) -> VerifyResult:
    """Three features and their pairs, all OK but for the given cells."""
    names = [("prefix-hit",), ("preemption",), ("prefix-hit", "preemption")]
    cells = {
        name: CellResult(features=name, verdict="OK", exercised=dict.fromkeys(name, "3 cached tokens"))
        for name in names
    }
    cells |= {cell.features: cell for cell in wrong}
    return VerifyResult(
        identity="ab" * 32,
        name="demo",
        target="cpu",
        engine="onnxruntime",
        seed=0,
        quick=True,
        logits="bit-equal",
        prompts="windows of the given text",
        requests={"exact-blocks": (64, 32), "one-token": (1, 32)},
        features=("prefix-hit", "preemption"),
        cells=tuple(cells.values()),
        seconds=1.5,
        verified_at="2026-01-31T12:00:00Z",
    )


def differing(*features: str) -> CellResult:
    """A cell with a difference."""
    name = "+".join(features)
    difference = "request one-less: tokens differ at output token 3: 5 on the plain path, here 7"
    return CellResult(
        features=features,
        verdict="DIFFERS",
        exercised=dict.fromkeys(features, "1"),
        differences=(difference,),
        repeat=f"{REPEAT} {name} --seed 0",
    )


def not_exercised(*features: str) -> CellResult:
    """A cell whose last feature took no part."""
    return CellResult(
        features=features,
        verdict="NOT EXERCISED",
        exercised={name: "" if name == features[-1] else "1" for name in features},
        repeat=f"{REPEAT} {'+'.join(features)} --seed 0",
    )
