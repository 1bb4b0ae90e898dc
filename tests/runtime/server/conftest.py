"""What all tests of servers have in common."""

import pytest

from ingot.runtime.server.models import swap


@pytest.fixture(autouse=True)
def _restarts_do_not_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap, "_PAUSES_SECONDS", (0.0,) * swap.MOST_RESTARTS)
