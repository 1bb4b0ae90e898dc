"""Model types that are not imported: the error names what they have."""

from pathlib import Path

import pytest

from ingot.errors import ConfigError
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.checkpoint.config import read_config
from ingot.pipeline.checkpoint.families import FAMILIES
from ingot.pipeline.checkpoint.refused_families import REFUSED
from tests.each_case import each_case
from tests.pipeline.tiny_checkpoint import copy_fixture


@each_case(
    ("model_type", "feature"),
    [
        ("dbrx", "clamped queries, keys and values"),
        ("mamba", "Mamba-1 layers"),
        ("mamba2", "no attention"),
        ("flint", "nothing that Ingot lacks, but it is not among the families yet"),
        ("deepseek_v32", "attention to tokens that an indexer chooses"),
        ("paligemma", "a vision tower"),
        ("moshi", "an audio tower"),
        ("t5", "an encoder"),
        ("bert", "an encoder"),
        ("bloom", "ALiBi positions"),
    ],
)
def test_a_refusal_names_the_feature(model_type: str, feature: str, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=f"model_type is '{model_type}', which Ingot does not import: it has {feature}. Ingot"
    ):
        read_config(Checkpoint.open(copy_fixture(tmp_path, model_type=model_type)))


def test_every_model_type_is_refused_for_one_feature_and_none_that_is_imported() -> None:
    names = [name for names in REFUSED.values() for name in names]
    assert len(set(names)) == len(names)
    assert not FAMILIES.keys() & set(names)
