"""Errors are taken block by block, so that no wrong tile is lost in a large result."""

import pytest

torch = pytest.importorskip("torch")

from benchmarks.gpu.proofs.operands import block_error  # noqa: E402


def test_one_wrong_block_of_a_large_result_shows() -> None:
    expected = torch.randn(200, 300)
    found = expected + 1e-3 * torch.randn(200, 300)
    assert block_error(found, expected) < 3e-3
    found[32:48, 64:80] = 0
    assert block_error(found, expected) == pytest.approx(1, abs=0.01)


def test_what_was_not_written_is_infinitely_wrong() -> None:
    expected = torch.randn(3, 5)
    found = expected.clone()
    found[2, 4] = torch.nan
    assert block_error(found, expected) == float("inf")


def test_small_numbers_are_compared_with_their_own_size() -> None:
    expected = torch.cat([torch.randn(16, 16), 1e-2 * torch.randn(16, 16)])
    found = expected.clone()
    found[16:] *= 1.1
    assert 0.05 < block_error(found, expected) < 0.11
