"""The result of a verification: as data in evidence/verify.json, in words, and as a table for terminal and report."""

from collections import Counter
from collections.abc import Iterator, Mapping
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


def matrix_rows(result: VerifyResult) -> list[tuple[str, list[str | CellResult]]]:
    """The lower triangle: name, then the feature alone and its pairs with the features of the rows before it."""
    found = {cell.features: cell for cell in result.cells}
    rows = []
    for number, name in enumerate(result.features):
        pairs: list[str | CellResult] = [found.get((other, name), "") for other in result.features[:number]]
        blank = [""] * (len(result.features) - 1 - number)
        rows.append((f"{number + 1} {name}", [found.get((name,), ""), *pairs, *blank]))
    return rows


def cell_text(cell: CellResult) -> list[str]:
    """Describe a cell's run and its faults."""
    if cell.verdict == "N/A":
        return [cell.reason]
    shown = [f"{name}: {figure or 'not exercised'}" for name, figure in cell.exercised.items()]
    return [*shown, *cell.differences, f"repeat: {cell.repeat}"]


def verify_sentences(result: VerifyResult) -> list[str]:
    """Report the numbers of cells checked and skipped, the reasons, the requests and the duration."""
    return list(_sentences(result))


def _sentences(result: VerifyResult) -> Iterator[str]:
    sizes = {1: "features alone", 2: "pairs", 3: "triples with speculation"}
    ran = [len(cell.features) for cell in result.cells if cell.verdict != "N/A"]
    counts = ", ".join(f"{ran.count(size)} {words}" for size, words in sizes.items() if size in ran)
    wrong = f"{result.count('DIFFERS')} differ, {result.count('NOT EXERCISED')} were not exercised"
    yield f"{result.verdict}: {counts or 'nothing'} checked against the plain path; {wrong}."
    lengths = [num_tokens for num_tokens, _ in result.requests.values()]
    equal = f"tokens, texts and reasons equal, logits {result.logits}; " if ran else ""  # else nothing was compared
    yield (
        f"{len(lengths)} requests with prompts of {min(lengths)} to {max(lengths)} tokens ({result.prompts}); {equal}"
        f"seed {result.seed}, {result.seconds:.0f} s."
    )
    skipped = dict.fromkeys(cell.reason for cell in result.cells if cell.verdict == "N/A")
    for reason in skipped:
        number = sum(cell.reason == reason for cell in result.cells)
        yield f"Not available, {number} cells: {reason}."
