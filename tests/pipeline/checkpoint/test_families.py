"""The rows of the families: each has the keys that its rules read, and its own defaults."""

from pathlib import Path
from typing import Any

import pytest

from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.checkpoint.config import DecoderConfig, read_config
from ingot.pipeline.checkpoint.families import FAMILIES, Family, WindowRule
from tests.pipeline.tiny_checkpoint import ABSENT, copy_fixture


def read(folder: Path, name: str = "llama", **changes: Any) -> DecoderConfig:
    return read_config(Checkpoint.open(copy_fixture(folder, name, **changes)))


@pytest.mark.parametrize("name", FAMILIES)
def test_an_absent_tie_word_embeddings_takes_the_familys_default(tmp_path: Path, name: str) -> None:
    tied = {"gemma2", "gemma3_text", "smollm3"}
    assert read(tmp_path, name, tie_word_embeddings=ABSENT).tied_embeddings == (name in tied)


KEYS_OF_WINDOWS: dict[WindowRule, set[str]] = {
    "none": set(),
    "all": {"sliding_window"},
    "from-max-window-layers": {"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"},
    "alternating": {"sliding_window", "layer_types"},
    "pattern": {"sliding_window", "sliding_window_pattern", "layer_types"},
    "unrotated": {"sliding_window", "use_sliding_window", "no_rope_layers", "no_rope_layer_interval", "layer_types"},
}


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_a_family_has_a_default_for_every_key_that_its_rules_read(family: Family) -> None:
    read = KEYS_OF_WINDOWS[family.windows] | ({family.scale_key} if family.scale_key else set())
    if "option" in (family.qkv_bias, family.output_bias):
        read |= {"attention_bias"}
    if family.attention_softcap:
        read |= {"attn_logit_softcapping"}
    assert read <= family.defaults.keys()
    assert ("hidden_act" in family.defaults) != ("hidden_activation" in family.defaults)
    if family.windows == "none":
        assert "sliding_window" not in family.defaults
