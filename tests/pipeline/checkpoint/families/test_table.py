"""The rows of the families: each has the keys that its rules read, and its own defaults."""

from pathlib import Path
from typing import Any

import pytest

from ingot.errors import ConfigError
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.checkpoint.config.decoder import DecoderConfig, read_config
from ingot.pipeline.checkpoint.families import FAMILIES, Family, WindowRule, missing_feature
from ingot.pipeline.checkpoint.families.table import TOWERS
from tests.data_paths import ROOT
from tests.each_case import each_case
from tests.pipeline.tiny_checkpoint import ABSENT, copy_fixture


def read(folder: Path, name: str = "llama", **changes: Any) -> DecoderConfig:
    return read_config(Checkpoint.open(copy_fixture(folder, name, **changes)))


@each_case("name", [name for name in FAMILIES if name not in TOWERS])
def test_an_absent_tie_word_embeddings_takes_the_familys_default(tmp_path: Path, name: str) -> None:
    tied = {"gemma2", "gemma3_text", "smollm3", "granite_swa", "ernie4_5", "cohere2", "starcoder2", "gpt2", "opt"}
    tied |= {"ernie4_5_moe", "lfm2", "lfm2_moe", "gemma4_text", "gemma4_unified_text", "gemma3n_text"}
    tied |= {"minicpm3", "youtu", "gemma", "vaultgemma", "cohere", "gpt_bigcode", "gpt_neo", "falcon"}
    tied |= {"biogpt", "xglm", "openai-gpt"}
    assert read(tmp_path, name, tie_word_embeddings=ABSENT).tied_embeddings == (name in tied)


KEYS_OF_WINDOWS: dict[WindowRule, set[str]] = {
    "none": set(),
    "all": {"sliding_window"},
    "from-max-window-layers": {"sliding_window", "max_window_layers", "layer_types"},
    "even-before-max-window-layers": {"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"},
    "alternating": {"sliding_window", "layer_types"},
    "pattern": {"sliding_window", "layer_types"},
    "pattern-or-none": {"sliding_window", "layer_types"},
    "local": {"attention_types", "window_size"},
    "listed-or-all": {"sliding_window", "layer_types"},
    "listed-or-none": {"sliding_window", "layer_types"},
    "unrotated": {"sliding_window", "use_sliding_window", "no_rope_layers", "no_rope_layer_interval", "layer_types"},
}


@each_case("family", FAMILIES.values(), ids=FAMILIES)
def test_a_family_has_a_default_for_every_key_that_its_rules_read(family: Family) -> None:
    read = KEYS_OF_WINDOWS[family.windows] | ({family.scale_key} - {None, "one"})
    if family.windows.startswith("pattern") and not family.full_every:
        read |= {family.keys.get("sliding_window_pattern", "sliding_window_pattern")}
    switches = (
        family.qkv_bias,
        family.output_bias,
        family.mlp_bias,
        family.parallel,
        family.qk_norm_key,
        family.epsilon_key,
        family.scaled_embedding,
    )
    read |= {switch for switch in switches if isinstance(switch, str) and switch}
    read |= set(family.keys.values()) - {
        "rotary_emb_base",
        "rotary_pct",
    }  # rope parameters, which have no defaults here
    if family.experts is not None:
        keys = (family.experts.count, family.experts.chosen, family.experts.width, family.experts.shared)
        rules = (family.experts.normalise, family.experts.least_sum, family.mtp.count_key if family.mtp else "")
        read |= {key for key in (*keys, *rules) if isinstance(key, str) and key}
        read |= {"n_group", "topk_group", "routed_scaling_factor"} if family.experts.groups else set()
    if family.latent is not None:
        read |= {"q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"}
        read |= {family.latent.interleaved} if isinstance(family.latent.interleaved, str) else set()
    if family.attention_softcap:
        read |= {"attn_logit_softcapping"}
    assert read <= family.defaults.keys()
    activations = {"activation", "hidden_act", "hidden_activation", "activation_function", "mlp_hidden_act", "afn"}
    activations |= {"ffn_config.ffn_act_fn.name"}
    assert len(activations & family.defaults.keys()) == 1
    if family.windows == "none":
        assert family.defaults.get("sliding_window") is None


def test_the_documentation_lists_every_family() -> None:
    table = (ROOT / "docs" / "models.md").read_text().split("## ")[0]
    assert {name for name in FAMILIES if f"`{name}`" in table} == FAMILIES.keys()


@each_case(
    ("model_type", "feature"),
    [
        ("jetmoe", "a mixture of attention heads"),
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
        ConfigError,
        match=f"model_type is '{model_type}', which Ingot does not import: it has {feature}. `ingot models`",
    ):
        read_config(Checkpoint.open(copy_fixture(tmp_path, model_type=model_type)))


def test_a_family_that_is_imported_is_not_refused() -> None:
    assert [name for name in FAMILIES if missing_feature(name)] == []
