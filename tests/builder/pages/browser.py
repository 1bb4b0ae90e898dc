"""A headless Chromium that is installed, for tests of pages: what it shows, and what axe-core finds in it."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SIZES = [(1400, "light"), (1400, "dark"), (390, "light"), (390, "dark")]


@contextmanager
def chromium() -> "Iterator[Browser]":
    """Start it; skip the test where it, or the package that drives it, is not installed."""
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed: apt-get install chromium")
    sync_api = pytest.importorskip("playwright.sync_api", reason="pip install --group test")
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def choose(page: "Page", name: str, value: float) -> None:
    """Move a slider, or choose from a list, to the place of a value."""
    page.locator(f"#{name}").evaluate(
        """(control, value) => {
          const place = JSON.parse(control.dataset.values).findIndex(each => Math.abs(each - value) < 1e-9);
          if (place < 0) throw new Error(`${control.id} has no value ${value}`);
          if (control.tagName === "SELECT") control.selectedIndex = place; else control.value = place;
          control.dispatchEvent(new Event("input", {bubbles: true}));
        }""",
        value,
    )


def facts(page: "Page", panel: str) -> dict[str, str]:
    """Return the named figures of a panel."""
    found: dict[str, str] = page.locator(f"#{panel} dl").evaluate(
        "list => Object.fromEntries([...list.children].map(row => [...row.children].map(each => each.textContent)))"
    )
    return found


def cells(page: "Page", panel: str) -> list[list[str]]:
    """Return the cells of a panel's table, without its header."""
    found: list[list[str]] = page.locator(f"#{panel} table").evaluate(
        "table => [...table.tBodies[0].rows].map(row => [...row.cells].map(cell => cell.textContent))"
    )
    return found


def problems(browser: "Browser", address: str, width: int, scheme: str, ready: str = "h1") -> list[str]:
    """Return what is wrong with a page at a width: errors, a page wider than the window, findings of axe-core."""
    from axe_playwright_python.sync_playwright import Axe

    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion="reduce")  # type: ignore[arg-type]
    found: list[str] = []
    page.on("console", lambda message: found.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: found.append(str(error)))
    page.goto(address)
    page.locator(ready).first.wait_for()
    if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
        found.append("the page is wider than the window")
    result = Axe().run(page)
    found += [f"{each['id']}: {node['html']}" for each in result.response["violations"] for node in each["nodes"]]
    page.close()
    return found
