"""The capped pool holds what it is to hold, its cells all run, and its table compares them."""

from pathlib import Path

import pytest
from benchmarks.kv.capped_pool import Cell, Load, cells, measure, pool_blocks, table

from tests.conftest import BuildArtifact

LOAD = Load(most_conversations=4, most_tokens=1 << 17, output_tokens=32, turns=1)


def test_the_pool_holds_all_or_a_share_that_the_conversations_outgrow() -> None:
    per_conversation = 1024 // 16 + 6 + 1
    assert pool_blocks(Cell(1024, 1, swaps=True), LOAD, 16) >= 4 * per_conversation
    assert 2 * 64 < pool_blocks(Cell(1024, 2, swaps=True), LOAD, 16) < 2 * per_conversation
    assert pool_blocks(Cell(1024, 4, swaps=True), LOAD, 16) == per_conversation


def test_fewer_converse_where_contexts_are_long() -> None:
    assert [LOAD.conversations(tokens) for tokens in (1 << 10, 1 << 16, 1 << 20)] == [4, 2, 1]


@pytest.mark.parametrize("swaps", [True, False])
def test_conversations_get_the_same_tokens_in_any_pool(
    build_unmeasured: BuildArtifact, two_layers: Path, swaps: bool
) -> None:
    artifact = build_unmeasured("fp32-cpu", two_layers)
    (whole, right), *others = (
        measure(artifact, cell, LOAD, most_seconds=60) for cell in cells([64], [1, 2, 4]) if cell.swaps is swaps
    )
    assert whole["lost"] == 0
    assert len(right) == 8
    for figures, answers in others:
        assert (figures["lost"], answers) == (0, right)
        assert figures["tokens_per_second"] > 0


def test_the_table_shows_each_rate_next_to_that_of_the_whole_pool() -> None:
    rows = [
        {"context_tokens": 1024, "swaps": swaps, "exceeded_by": times, "tokens_per_second": rate}
        for swaps, times, rate in ((True, 1, 200.0), (True, 2, 150.0), (False, 2, 20.0))
    ]
    assert table(rows).splitlines() == [
        "| context | swap, 1 | swap, 2 | recompute, 2 |",
        "|---|---|---|---|",
        "| 1024 | 200 (100%) | 150 (75%) | 20 (10%) |",
    ]
