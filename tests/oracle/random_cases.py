"""Random configurations of every family, for untested combinations. The same seed gives the same case."""

import random
from typing import Any

from ingot.pipeline.checkpoint.families import FAMILIES
from tests.oracle.cases import LENGTHS, WINDOW, Case

_LONG = (40, 36, 33)  # all beyond longrope's original context of 32


def random_case(model_type: str, seed: int) -> Case:
    """A case of the family with random heads, biases, windows, rope and spelling."""
    rng = random.Random(f"{model_type} {seed}")
    config, head_dim = _heads(rng, model_type)
    config |= _switches(rng, model_type) | _windows(rng, model_type) | _scales(rng, model_type)
    rope = _rope(rng, model_type, head_dim)
    rewrite = _spelling(rng, model_type, rope)
    long = rope.get("rope_type") == "longrope" and rng.random() < 0.5
    return Case(
        name=f"{model_type}-{seed}",
        model_type=model_type,
        config=config | _place_rope(rng, model_type, rope),
        dtype=rng.choice(["float32", "float16", "bfloat16"]),
        rewrite=rewrite,
        lengths=_LONG if long else LENGTHS,
        context_tokens=64 if long else None,
    )


def _heads(rng: random.Random, model_type: str) -> tuple[dict[str, Any], int]:
    heads, kv_heads = rng.choice([(4, 2), (4, 4), (4, 1), (2, 1)])
    config: dict[str, Any] = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    if model_type == "phi3":  # its check of longrope's factors does not know head_dim
        return config, 32 // heads
    head_dim = rng.choice([8, 16])
    return config | {"head_dim": head_dim}, head_dim


def _switches(rng: random.Random, model_type: str) -> dict[str, Any]:
    keys = [key for key in ("attention_bias", "mlp_bias") if key in FAMILIES[model_type].defaults]
    activation = "hidden_activation" if model_type.startswith("gemma") else "hidden_act"
    return {
        "tie_word_embeddings": rng.random() < 0.5,
        activation: rng.choice(["silu", "gelu", "gelu_pytorch_tanh"]),
        **{key: rng.random() < 0.5 for key in keys},
    }


def _windows(rng: random.Random, model_type: str) -> dict[str, Any]:
    """Any key that the family reads; a Gemma has sliding layers always, so never a null window."""
    values: dict[str, list[Any]] = {
        "use_sliding_window": [True, True, False],
        "sliding_window": [1, 5, WINDOW, 100 if model_type.startswith("gemma") else None],
        "max_window_layers": [0, 1, 2, 9],
        "no_rope_layer_interval": [2, 3],
    }
    defaults = FAMILIES[model_type].defaults
    return {key: rng.choice(choices) for key, choices in values.items() if key in defaults}


def _scales(rng: random.Random, model_type: str) -> dict[str, Any]:
    values: dict[str, list[Any]] = {
        "query_pre_attn_scalar": [8, 24, 100],
        "final_logit_softcapping": [None, 3.0],
        "embedding_multiplier": [1.0, 3.0],
        "residual_multiplier": [0.4],
        "attention_multiplier": [0.2],
        "logits_scaling": [1.0, 2.0],
    }
    if model_type == "gemma2":
        values["attn_logit_softcapping"] = [None, 2.0, 50.0]
    defaults = FAMILIES[model_type].defaults
    return {key: rng.choice(choices) for key, choices in values.items() if key in defaults}


def _rope(rng: random.Random, model_type: str, head_dim: int) -> dict[str, Any]:
    """Rope parameters, or none at all."""
    steps = range(head_dim // 2)
    kinds: dict[str, dict[str, Any]] = {
        "default": {},
        "linear": {"factor": rng.choice([2.0, 4.0])},
        "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "yarn": {"factor": rng.choice([2.0, 4.0]), **_yarn_options(rng)},
        "longrope": {
            "short_factor": [1 + step / 10 for step in steps],
            "long_factor": [1 + step / 2 for step in steps],
        },
    }
    allowed = {"phi3": ["default", "longrope"], "gemma3_text": ["default", "linear", "llama3"]}
    kind = rng.choice([*allowed.get(model_type, list(kinds)), ""])
    if not kind:
        return {}
    original = {"original_max_position_embeddings": 32} if kind in ("llama3", "yarn", "longrope") else {}
    return {"rope_type": kind, "rope_theta": rng.choice([100.0, 1000.0, 500000.0]), **kinds[kind], **original}


def _yarn_options(rng: random.Random) -> dict[str, Any]:
    options: list[dict[str, Any]] = [
        {"attention_factor": 1.3},
        {"mscale": 1.2, "mscale_all_dim": 0.7},
        {"truncate": False},
        {"beta_fast": 2.0, "beta_slow": 0.25},
    ]
    return {key: value for option in options if rng.random() < 0.4 for key, value in option.items()}


def _place_rope(rng: random.Random, model_type: str, rope: dict[str, Any]) -> dict[str, Any]:
    if model_type == "gemma3_text" and rope:
        local = {"rope_type": "default", "rope_theta": rng.choice([300.0, 10000.0])}
        return {"rope_parameters": {"full_attention": rope, "sliding_attention": local}}
    extra = {"original_max_position_embeddings": 32} if model_type == "phi3" else {}
    return extra | ({"rope_parameters": rope} if rope else {})


def _spelling(rng: random.Random, model_type: str, rope: dict[str, Any]) -> dict[str, Any]:
    """Changes of config.json that mean the same in an older spelling, or another layer pattern for Gemma 3."""
    changes: dict[str, Any] = {"layer_types": None} if rng.random() < 0.5 else {}
    if model_type == "gemma3_text":
        return changes | ({"sliding_window_pattern": rng.choice([2, 3])} if changes else {})
    if rope and rng.random() < 0.5:
        scaling = {key: value for key, value in rope.items() if key not in ("rope_type", "rope_theta")}
        changes |= {"rope_parameters": None, "rope_theta": rope["rope_theta"]}
        if rope["rope_type"] != "default":
            changes["rope_scaling"] = {rng.choice(["type", "rope_type"]): rope["rope_type"], **scaling}
    return changes
