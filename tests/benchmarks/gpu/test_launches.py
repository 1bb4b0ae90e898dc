import pytest
from benchmarks.gpu.times.launches import share_of_experts


def test_experts_that_no_token_chooses_are_not_read() -> None:
    assert share_of_experts(128, 0) == 0
    assert share_of_experts(128, 1) == pytest.approx(1 / 128)
    assert share_of_experts(2, 2) == pytest.approx(3 / 4)
    assert share_of_experts(64, 10_000) == pytest.approx(1)
