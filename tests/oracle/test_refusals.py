"""The table of refused model types is that of the installed transformers, and names every text model."""

import pytest

from ingot.pipeline.checkpoint.families import FAMILIES
from ingot.pipeline.checkpoint.refused_families import REFUSED
from ingot.pipeline.checkpoint.text_tower import TEXT_TOWERS
from tests.oracle import make_refusals

pytest.importorskip("transformers", reason="the oracle needs transformers")
pytestmark = pytest.mark.oracle


def test_every_model_type_is_imported_or_refused_by_its_feature() -> None:
    by_reason: dict[str, list[str]] = {}
    for name in make_refusals.model_types():
        if name not in FAMILIES and name not in TEXT_TOWERS:
            by_reason.setdefault(make_refusals.reason_of(name), []).append(name)
    assert {reason: tuple(sorted(names)) for reason, names in by_reason.items()} == REFUSED
    assert make_refusals.FILE.read_text() == make_refusals.content(by_reason)
