"""What the environment sets is refused by name when it cannot be."""

import pytest

from ingot import settings
from ingot.errors import UsageError


def test_threads_are_what_the_environment_says_else_at_least_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INGOT_THREADS", raising=False)
    assert 1 <= settings.num_threads() <= settings.MAX_THREADS
    monkeypatch.setenv("INGOT_THREADS", "3")
    assert settings.num_threads() == 3


@pytest.mark.parametrize("text", ["0", "-1", "two", "", "100000"])
def test_a_number_of_threads_that_cannot_be_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INGOT_THREADS", text)
    with pytest.raises(UsageError, match=f"INGOT_THREADS is '{text}'; it must be a whole number from 1 to 256"):
        settings.num_threads()


def test_kernels_are_waited_for_only_where_that_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INGOT_CUDA_BLOCKING", raising=False)
    assert not settings.cuda_blocking()
    monkeypatch.setenv("INGOT_CUDA_BLOCKING", "1")
    assert settings.cuda_blocking()
    monkeypatch.setenv("INGOT_CUDA_BLOCKING", "yes")
    with pytest.raises(UsageError, match="INGOT_CUDA_BLOCKING is 'yes'; it must be 0 or 1"):
        settings.cuda_blocking()
