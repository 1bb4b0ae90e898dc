"""A recipe that measures is refused before the build on a machine without its GPU."""

from types import SimpleNamespace

import pytest

from ingot.builder import requirements
from ingot.builder.requirements import require_gpu
from ingot.errors import EngineError, UsageError
from ingot.pipeline.recipe.load import load_recipe
from ingot.pipeline.recipe.schema import Recipe
from tests.data_paths import ROOT

MEASURED = (f"evaluation.text={ROOT / 'README.md'}",)


def opens(monkeypatch: pytest.MonkeyPatch, sm: int | None) -> None:
    """Set up a machine with one GPU of that SM, or without a GPU."""

    def open_device() -> SimpleNamespace:
        if sm is None:
            raise EngineError("no GPU here")
        return SimpleNamespace(name="a GPU", sm=sm, close=lambda: None)

    monkeypatch.setattr(requirements, "open_device", open_device)


def recipe(*overrides: str) -> Recipe:
    return load_recipe("int4-cuda", overrides)


def test_without_a_gpu_only_unmeasured_recipes_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    opens(monkeypatch, None)
    require_gpu(recipe())
    require_gpu(load_recipe("int4-cpu", MEASURED))
    with pytest.raises(UsageError, match=r"target cuda-sm90, which needs such a GPU: no GPU here.*evaluation=null"):
        require_gpu(recipe(*MEASURED))


@pytest.mark.parametrize(
    ("target", "sm", "allowed"), [("cuda-sm90", 90, True), ("cuda-sm80", 86, True), ("cuda-sm90", 89, False)]
)
def test_the_gpu_must_run_the_program(target: str, sm: int, allowed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    opens(monkeypatch, sm)
    wanted = recipe(*MEASURED, f"target={target}")
    if allowed:
        require_gpu(wanted)
    else:
        with pytest.raises(UsageError, match="a GPU has SM 89, and the program is for SM 90"):
            require_gpu(wanted)
