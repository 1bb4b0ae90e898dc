"""The browser of the tests of pages: one for each module, as its driver keeps an event loop in the thread."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.builder.pages.browser import chromium

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    with chromium() as found:
        yield found
