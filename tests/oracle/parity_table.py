"""Prints the parity table as markdown, from the committed fixtures. No torch.

python -m tests.oracle.parity_table             the IR in plain onnxruntime
python -m tests.oracle.parity_table --engine    the artifact of the recipe fp32-cpu in Ingot's engine, 7 tokens a step
"""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from ingot.builder import build
from tests.conftest import UNMEASURED
from tests.oracle.all_cases import ALL_CASES
from tests.oracle.cases import Case
from tests.parity import CHECKPOINTS, LOGITS, Parity, compare, engine_logits, load_logits, measure, settings_of


def measure_engine(case: Case) -> Parity:
    """Build the case's artifact, and compare the engine's logits."""
    tokens, expected = load_logits(CHECKPOINTS / case.name / LOGITS)
    settings = [f"checkpoint={CHECKPOINTS / case.name}", *UNMEASURED, *settings_of(case)]
    with tempfile.TemporaryDirectory() as folder:
        artifact = build("fp32-cpu", settings, Path(folder) / case.name).artifact
        return compare(engine_logits(artifact, tokens, max_batch_tokens=7), expected)


def main(measure_case: Callable[[Case], Parity]) -> None:
    """One row per tiny checkpoint, then the worst of each family."""
    print("| family | checkpoint | stored as | prompts | largest logit | worst difference | limit |")
    print("|---|---|---|---|---|---|---|")
    worst: dict[str, float] = {}
    for case in ALL_CASES:
        parity = measure_case(case)
        worst[case.model_type] = max(worst.get(case.model_type, 0.0), parity.worst)
        lengths = ", ".join(map(str, case.lengths))
        print(
            f"| {case.model_type} | {case.name} | {case.dtype} | {lengths} | {parity.largest:.2f} "
            f"| {parity.worst:.1e} | {parity.limit:.1e} |"
        )
    print("\n| family | worst difference |\n|---|---|")
    for family, difference in worst.items():
        print(f"| {family} | {difference:.1e} |")


if __name__ == "__main__":
    main(measure_engine if "--engine" in sys.argv[1:] else measure)
