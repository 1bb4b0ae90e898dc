"""An artifact says how its engine is made; the caller may say otherwise."""

from ingot.runtime import Engine
from tests.conftest import BuildArtifact
from tests.data_paths import DEMO_MODEL


def test_the_recipes_max_batch_tokens_is_the_engines_unless_the_caller_names_another(
    build_unmeasured: BuildArtifact,
) -> None:
    artifact = build_unmeasured("fp32-cpu", DEMO_MODEL, "engine.max_batch_tokens=96")
    with Engine.load(artifact, kv_blocks=16) as engine:
        assert engine.core.max_batch_tokens == 96
    with Engine.load(artifact, kv_blocks=16, max_batch_tokens=32) as engine:
        assert engine.core.max_batch_tokens == 32
