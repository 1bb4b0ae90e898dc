"""A recipe that measures on a card is refused at once where there is none of its kind."""

from types import SimpleNamespace

import pytest

from ingot.builder import gpu_check as card
from ingot.builder.gpu_check import require_card
from ingot.errors import EngineError, UsageError
from ingot.pipeline.recipe.load import load_recipe
from ingot.pipeline.recipe.schema import Recipe
from tests.data_paths import ROOT

MEASURED = (f"evaluation.text={ROOT / 'README.md'}",)


def opens(monkeypatch: pytest.MonkeyPatch, sm: int | None) -> None:
    """A machine with one card of that SM, or none."""

    def open_device() -> SimpleNamespace:
        if sm is None:
            raise EngineError("no card here")
        return SimpleNamespace(name="a card", sm=sm, close=lambda: None)

    monkeypatch.setattr(card, "open_device", open_device)


def recipe(*overrides: str) -> Recipe:
    return load_recipe("int4-cuda", overrides)


def test_without_a_card_only_what_is_not_measured_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    opens(monkeypatch, None)
    require_card(recipe())
    require_card(load_recipe("int4-cpu", MEASURED))
    with pytest.raises(UsageError, match=r"target cuda-sm90, which takes such a card: no card here.*evaluation=null"):
        require_card(recipe(*MEASURED))


@pytest.mark.parametrize(
    ("target", "sm", "allowed"), [("cuda-sm90", 90, True), ("cuda-sm80", 86, True), ("cuda-sm90", 89, False)]
)
def test_the_card_must_run_what_is_built(target: str, sm: int, allowed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    opens(monkeypatch, sm)
    wanted = recipe(*MEASURED, f"target={target}")
    if allowed:
        require_card(wanted)
    else:
        with pytest.raises(UsageError, match="a card has SM 89, and it is built for 90"):
            require_card(wanted)
