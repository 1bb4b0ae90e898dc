"""Paths of test data outside the repository: INGOT_TEST_DATA, else ../shared/data next to the checkout."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FIXTURES = ROOT / "tests" / "fixtures"
DEMO_MODEL = ROOT / "examples" / "models" / "stdlib-llama-6m"


def shared_data(relative: str = ".") -> Path:
    """Path below the shared test data; skips the test, with the reason, where it is missing."""
    path = Path(os.environ.get("INGOT_TEST_DATA") or ROOT.parent / "shared" / "data") / relative
    if not path.exists():
        pytest.skip(f"test data {relative} not found; set INGOT_TEST_DATA to the folder that holds it")
    return path
