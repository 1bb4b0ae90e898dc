"""The table of instructions shows every kernel that was counted."""

import json

from benchmarks.paths import RESULTS
from benchmarks.programs.instruction_table import NAMES, kernel_table, uses

COUNTS = json.loads((RESULTS / "instructions.json").read_text("utf-8"))["counts"]


def test_every_counted_kernel_has_one_use() -> None:
    for name in NAMES:
        for kind in ("matmul", "attention", "sampling"):
            for row in COUNTS[name][kind]["rows"]:
                assert len([use for use, _, is_in in uses() if is_in(row)]) == 1, (name, row["form"])


def test_every_use_has_a_kernel_on_both_sms_before_and_after() -> None:
    head, _, *lines = kernel_table(COUNTS).splitlines()
    assert head.count("SM 80") == head.count("SM 90") == 2
    assert len(lines) == len(list(uses()))
    assert not [line for line in lines if "| - |" in line]
