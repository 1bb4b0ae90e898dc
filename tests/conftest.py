"""Fixtures that several areas share: artifacts built once per run, caches kept out of the user's folders."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from ingot.artifact import Artifact
from ingot.builder import build
from tests.data_paths import DEMO_MODEL

UNMEASURED = ("evaluation=null", "latency=null", "gates={}")

BuildArtifact = Callable[..., Artifact]

settings.register_profile("ingot", deadline=None)  # no test says how long anything takes
settings.load_profile("ingot")


@pytest.fixture(scope="session", autouse=True)
def _cache_of_this_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Baselines of tests are made in a folder of this run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INGOT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def build_unmeasured(tmp_path_factory: pytest.TempPathFactory) -> BuildArtifact:
    """build_unmeasured(recipe, checkpoint, *overrides) -> Artifact, made once for equal arguments."""
    made: dict[tuple[str, ...], Artifact] = {}

    def make(recipe: str, checkpoint: Path = DEMO_MODEL, *overrides: str) -> Artifact:
        key = (recipe, str(checkpoint), *overrides)
        if key not in made:
            settings = [f"checkpoint={checkpoint}", *UNMEASURED, *overrides]
            made[key] = build(recipe, settings, tmp_path_factory.mktemp("artifact") / recipe).artifact
        return made[key]

    return make
