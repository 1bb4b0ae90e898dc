"""Prints the parity table as markdown, from the committed fixtures: python -m tests.oracle.parity_table. No torch."""

from tests.oracle.cases import CASES
from tests.parity import measure


def main() -> None:
    """One row per tiny checkpoint, then the worst of each family."""
    print("| family | checkpoint | stored as | prompts | largest logit | worst difference | limit |")
    print("|---|---|---|---|---|---|---|")
    worst: dict[str, float] = {}
    for case in CASES:
        parity = measure(case)
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
    main()
