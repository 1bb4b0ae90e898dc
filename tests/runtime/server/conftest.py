"""What all tests of servers have in common."""

import pytest

from ingot.runtime.server import replacement


@pytest.fixture(autouse=True)
def _restarts_do_not_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replacement, "_PAUSES_SECONDS", (0.0,) * replacement.MOST_RESTARTS)
