"""The table of refused model types is that of the installed transformers, and names every text model."""

import json

import pytest

from tests.oracle import make_refusals

pytest.importorskip("transformers", reason="the oracle needs transformers")
pytestmark = pytest.mark.oracle


def test_every_model_type_is_imported_or_refused_by_its_feature() -> None:
    assert json.loads(make_refusals.FILE.read_text()) == make_refusals.refusals()
