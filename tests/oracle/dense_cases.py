"""A tiny checkpoint of every family that differs from the first ten in fields of the table alone. Data only.

Each switches on what its family adds: biases, windows with prompts beyond them, partial or interleaved rope, parallel
blocks. Untied heads and other combinations are those of pairwise_cases.py.
"""

from tests.oracle.cases import WINDOW, Case

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "beta_fast": 2.0,
    "beta_slow": 0.25,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
    "original_max_position_embeddings": 16,
}
_GPT2_SIZES = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
_TWO_LAYERS = {"num_hidden_layers": 2}
_WIDE_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}  # rope rotates a quarter of 16

DENSE_CASES = (
    Case("arcee", "arcee", {**_TWO_LAYERS, "attention_bias": True, "mlp_bias": True}, dtype="bfloat16"),
    Case(
        "seed_oss",
        "seed_oss",
        {**_TWO_LAYERS, "head_dim": 16, "attention_out_bias": True, "mlp_bias": True, "rope_parameters": _YARN},
    ),
    Case(
        "ministral3",
        "ministral3",
        {
            **_TWO_LAYERS,
            "head_dim": 16,
            "sliding_window": WINDOW,
            "rope_parameters": {**_YARN, "original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.3},
        },
    ),
    Case(
        "granite_swa",
        "granite_swa",
        {
            "num_hidden_layers": 4,
            "sliding_window": WINDOW,
            "layer_rope_theta": [0.0, 100.0, 10000.0, 100.0],
            "attention_bias": True,
            "mlp_bias": True,
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
        },
    ),
    Case("gemma", "gemma", {**_TWO_LAYERS, "head_dim": 16}, rewrite={"hidden_act": "gelu"}),
    Case("vaultgemma", "vaultgemma", {**_TWO_LAYERS, "head_dim": 16, "sliding_window": WINDOW}, dtype="bfloat16"),
    Case("cwm", "cwm", {"num_hidden_layers": 4, "head_dim": 8, "sliding_window": WINDOW}),
    Case(
        "ministral",
        "ministral",
        {
            **_TWO_LAYERS,
            "head_dim": 8,
            "sliding_window": WINDOW,
            "layer_types": ["full_attention", "sliding_attention"],
        },
    ),
    Case("glm", "glm", {**_TWO_LAYERS, "head_dim": 16}, dtype="bfloat16"),
    Case("cohere", "cohere", {**_TWO_LAYERS, "logit_scale": 2.0, "attention_bias": True}),
    Case("jais2", "jais2", _TWO_LAYERS),
    Case("olmo3", "olmo3", {"num_hidden_layers": 4, "sliding_window": WINDOW}),
    Case("apertus", "apertus", {**_TWO_LAYERS, "attention_bias": True, "tie_word_embeddings": True}, dtype="bfloat16"),
    Case("exaone4", "exaone4", {"num_hidden_layers": 4, "sliding_window": WINDOW}),
    Case(
        "hunyuan_v1_dense",
        "hunyuan_v1_dense",
        {**_TWO_LAYERS, "head_dim": 16, "rope_parameters": {"rope_type": "dynamic", "alpha": 40.0, "factor": 1.0}},
    ),
    Case("glm4", "glm4", {**_TWO_LAYERS, "head_dim": 16}),
    Case("ernie4_5", "ernie4_5", {**_TWO_LAYERS, "head_dim": 16, "use_bias": True}, dtype="bfloat16"),
    Case("hyperclovax", "hyperclovax", {**_TWO_LAYERS, "residual_multiplier": 0.4, "logits_scaling": 2.0}),
    Case("iquestcoder", "iquestcoder", {**_TWO_LAYERS, "head_dim": 16}, dtype="bfloat16"),
    Case("helium", "helium", {**_TWO_LAYERS, "head_dim": 8, "attention_bias": True, "mlp_bias": True}),
    Case("cohere2", "cohere2", {"num_hidden_layers": 4, "sliding_window": WINDOW, "logit_scale": 2.0}),
    Case("nemotron", "nemotron", {**_TWO_LAYERS, "attention_bias": True, "mlp_bias": True}, dtype="bfloat16"),
    Case("starcoder2", "starcoder2", {**_TWO_LAYERS, "sliding_window": WINDOW}),
    Case("stablelm", "stablelm", {**_TWO_LAYERS, **_WIDE_HEADS, "use_qkv_bias": True, "use_parallel_residual": True}),
    Case("phi", "phi", {**_TWO_LAYERS, "qk_layernorm": True}),
    Case("gpt2", "gpt2", _GPT2_SIZES),
    Case("gpt_bigcode-every-head", "gpt_bigcode", {**_GPT2_SIZES, "multi_query": False}),
    Case("gpt_bigcode", "gpt_bigcode", {**_GPT2_SIZES, "num_key_value_heads": 1}),
    Case("gptj", "gptj", {**_GPT2_SIZES, "rotary_dim": 4}, dtype="bfloat16"),
    Case("gpt_neox", "gpt_neox", {**_TWO_LAYERS, **_WIDE_HEADS}),
    Case("opt", "opt", {**_TWO_LAYERS, "ffn_dim": 48}, dtype="bfloat16"),
    Case(
        "gpt_neo",
        "gpt_neo",
        {**_TWO_LAYERS, "attention_types": [[["global", "local"], 1]], "window_size": WINDOW},
    ),
    Case("falcon", "falcon", {**_TWO_LAYERS, "num_key_value_heads": 1}),
    Case("falcon-two-norms", "falcon", {**_TWO_LAYERS, "num_key_value_heads": 1, "parallel_attn": False, "bias": True}),
    Case(
        "falcon-grouped",
        "falcon",
        {**_TWO_LAYERS, "new_decoder_architecture": True, "num_kv_heads": 2, "multi_query": False},
    ),
    Case(
        "falcon-every-head",
        "falcon",
        {**_TWO_LAYERS, "multi_query": False, "parallel_attn": False, "bias": True},
    ),
    Case("olmo", "olmo", _TWO_LAYERS),
    Case("olmo-clipped", "olmo", {**_TWO_LAYERS, "clip_qkv": 0.3}),
    Case(
        "opt-projected",
        "opt",
        {**_TWO_LAYERS, "ffn_dim": 48, "word_embed_proj_dim": 16, "do_layer_norm_before": False},
    ),
    Case("biogpt", "biogpt", _TWO_LAYERS, dtype="bfloat16"),
    Case("xglm", "xglm", {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4}),
    Case("openai-gpt", "openai-gpt", _GPT2_SIZES),
    Case("codegen", "codegen", {**_GPT2_SIZES, "rotary_dim": 4}, dtype="bfloat16"),
    Case("persimmon", "persimmon", {**_TWO_LAYERS, **_WIDE_HEADS}),
    Case("nanochat", "nanochat", {**_TWO_LAYERS, "attention_bias": True}),
    Case("bitnet", "bitnet", _TWO_LAYERS, dtype="bfloat16"),
    Case("internlm3", "internlm3", {**_TWO_LAYERS, "head_dim": 16, "attention_bias": True, "mlp_bias": True}),
)
