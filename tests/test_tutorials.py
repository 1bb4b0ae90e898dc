"""The tutorials are true: each runs in a folder of its own, line by line, and prints what its page shows."""

from pathlib import Path

import pytest

from tests.data_paths import ROOT
from tests.documents import run_page

TUTORIALS = ROOT / "docs" / "tutorials"
PACKAGES = {  # modules that a page needs besides Ingot's
    "ci": (),
    "fastapi": ("fastapi", "mypy", "uvicorn"),
    "own-model": ("starlette", "uvicorn"),
    "own-pass": ("hatchling", "mypy"),
}


def test_every_tutorial_is_run() -> None:
    assert sorted(PACKAGES) == sorted(page.stem for page in TUTORIALS.iterdir())


@pytest.mark.parametrize("name", PACKAGES)
def test_a_tutorial_does_what_it_shows(name: str, tmp_path: Path) -> None:
    for module in PACKAGES[name]:
        pytest.importorskip(module, reason=f"{module} is not installed")
    page = TUTORIALS / f"{name}.md"
    for step in run_page(page, tmp_path, {"INGOT_CACHE": str(tmp_path / "cache")}):
        assert step.is_as_shown, f"{page.name}:{step.block.line} printed\n{step.output}\nand shows\n{step.expected}"
