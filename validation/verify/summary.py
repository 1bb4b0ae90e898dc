"""The result of a verification in words and as a table, for the terminal and the report."""

from collections.abc import Iterator

from ingot.validation.verify.result import CellResult, VerifyResult


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
