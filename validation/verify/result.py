"""The result of a verification as data: read from and written to evidence/verify.json."""

from collections import Counter
from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict

from ingot.errors import GateFailed, GateUndecided
from ingot.validation.statistics import Estimate, Measured

VERIFY_FILE = "verify.json"
_SHOWN = 5  # cells that a message names
ADVICE = (
    "In these commands ARTIFACT is the artifact's folder, and a file of --prompts the recipe's evaluation text. A build"
    " keeps no artifact that a gate rejects: to have it, build again with --set gates={}."
)
CellVerdict = Literal["OK", "DIFFERS", "NOT EXERCISED", "N/A"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class CellResult(_Frozen):
    """One feature, pair or triple.

    verdict      OK: every answer equals the plain path's; NOT EXERCISED: the run was not what it should verify
    exercised    feature -> the figure that shows that it took part
    differences  sentences, one per request that got another answer, or an error of the engine
    reason       why it is N/A
    repeat       the command that runs this cell alone
    """

    features: tuple[str, ...]
    verdict: CellVerdict
    exercised: Mapping[str, str] = {}
    differences: tuple[str, ...] = ()
    reason: str = ""
    repeat: str = ""
    seconds: float = 0.0

    @property
    def name(self) -> str:
        """The features as --only takes them."""
        return "+".join(self.features)


class VerifyResult(_Frozen):
    """A verification: what was verified, how, and every cell.

    logits      "bit-equal", or "within X of the row's largest logit"
    prompts     where they came from
    requests    name -> tokens of prompt and plain answer
    """

    identity: str
    name: str
    target: str
    engine: str
    seed: int
    quick: bool
    logits: str
    prompts: str
    requests: Mapping[str, tuple[int, int]]
    features: tuple[str, ...]
    cells: tuple[CellResult, ...]
    seconds: float
    verified_at: str

    def count(self, verdict: CellVerdict) -> int:
        """Number of cells with this verdict."""
        return Counter(cell.verdict for cell in self.cells)[verdict]

    @property
    def failures(self) -> tuple[CellResult, ...]:
        """Cells that differ or were not exercised."""
        return tuple(cell for cell in self.cells if cell.verdict in ("DIFFERS", "NOT EXERCISED"))

    @property
    def num_checked(self) -> int:
        """Cells that ran."""
        return len(self.cells) - self.count("N/A")

    @property
    def verdict(self) -> Literal["PASS", "FAIL", "UNDECIDED"]:
        """FAIL when a cell differs; UNDECIDED when one was not exercised, or none ran; else PASS."""
        if self.count("DIFFERS"):
            return "FAIL"
        return "PASS" if self.num_checked and not self.failures else "UNDECIDED"

    def as_json(self) -> str:
        """The text of verify.json."""
        return self.model_dump_json(indent=1) + "\n"


def raise_for_cells(result: VerifyResult) -> None:
    """Raise GateFailed when a cell differs, GateUndecided when one was not exercised, or none ran; with their names."""
    if result.verdict == "PASS":
        return
    lines = ["verify: not every answer was proved equal to the plain path's", *failure_lines(result)]
    if not result.num_checked:
        reasons = dict.fromkeys(cell.reason for cell in result.cells)
        lines = [f"verify: no cell was run, so nothing is proved: {'; '.join(reasons)}"]
    message = "\n".join(lines)
    raise (GateFailed if result.verdict == "FAIL" else GateUndecided)(message)


def failure_lines(result: VerifyResult) -> list[str]:
    """Name the first cells that did not pass, with the first difference and the command that repeats it."""
    lines = [f"{cell.name} {cell.verdict}: {_first(cell)}; repeat it with `{cell.repeat}`" for cell in result.failures]
    return lines[:_SHOWN] + ([f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else [])


def verify_metrics(result: VerifyResult) -> list[Measured]:
    """The metric `verify`: cells that differ, up to those that may, because they were not exercised."""
    differing, unproven = result.count("DIFFERS"), result.count("NOT EXERCISED")
    if not result.num_checked:
        unproven = len(result.cells)
    high = float(differing + unproven)
    method = "cells that were not exercised may differ" if unproven else "exact"
    estimate = Estimate(float(differing), float(differing), high, result.num_checked, method)
    lines = failure_lines(result)
    return [Measured("verify", estimate, details=(*lines, ADVICE) if lines else ())]


def _first(cell: CellResult) -> str:
    if cell.differences:
        return cell.differences[0]
    missing = [name for name, figure in cell.exercised.items() if not figure]
    return f"the run did not exercise {' and '.join(missing)}"
