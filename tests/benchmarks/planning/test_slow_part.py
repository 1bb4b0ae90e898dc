"""The curve of tokens a second over context has no cliff, unlike the two ways that are drawn next to it."""

import pytest
from benchmarks.planning.slow_part import LINKS, found_share, measure, table


def test_the_slow_part_reaches_what_the_link_allows_at_every_context() -> None:
    found = measure("rtx-4090", [1024, 40960, 43008, 65536])
    first, *_, within, beyond = rows = found["contexts"]
    for row in rows:
        for link in LINKS:
            assert 0.95 <= row[link]["share_of_bound"] <= 1.02
            for other in ("all_on_host", "paged"):
                least = row[link][f"{other}_tokens_per_second"]
                assert row[link]["slow_part_tokens_per_second"] >= 0.99 * least
    assert first["slow_blocks"] == 0 < within["slow_blocks"] < beyond["slow_blocks"]
    assert within["PCIe 4"]["slow_part_tokens_per_second"] > 0.8 * within["large_pool_tokens_per_second"]
    assert beyond["PCIe 5"]["slow_part_tokens_per_second"] > 1.5 * beyond["PCIe 4"]["slow_part_tokens_per_second"]
    assert "| 65,536 |" in table(found)


def test_pages_that_are_evicted_at_random_are_found_less_the_less_fits() -> None:
    assert found_share(10, 10) == 1.0
    shares = [found_share(size, 10) for size in (10.5, 11, 15, 40)]
    assert shares == sorted(shares, reverse=True)
    # 1 - h = m solves h = exp(-1.5 m): 0.417 of a round over half more than the memory.
    assert shares[2] == pytest.approx(0.4172, abs=1e-3)
