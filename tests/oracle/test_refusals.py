"""The table of refused model types is that of the installed transformers, and names every text model."""

import json

import pytest

pytest.importorskip("transformers", reason="the oracle needs transformers")

from tests.oracle import make_refusals

pytestmark = pytest.mark.oracle


def test_every_model_type_is_imported_or_refused_by_its_feature() -> None:
    assert json.loads(make_refusals.FILE.read_text()) == make_refusals.refusals()


def test_every_model_type_around_a_family_is_known() -> None:
    assert json.loads(make_refusals.AROUND_FILE.read_text()) == make_refusals.towers()


def test_the_page_has_every_model_type() -> None:
    assert make_refusals.DOC.read_text() == make_refusals.page()
