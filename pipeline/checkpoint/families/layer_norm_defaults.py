"""Defaults of the families with LayerNorm, as in rms_norm_defaults.py."""

from typing import Any

from ingot.pipeline.checkpoint.families.rms_norm_defaults import ANY

_LAYER_NORM: dict[str, Any] = {key: value for key, value in ANY.items() if key != "rms_norm_eps"}
COHERE2 = _LAYER_NORM | {
    "layer_norm_eps": 1e-5,
    "hidden_act": "silu",
    "vocab_size": 256000,
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "max_position_embeddings": 8192,
    "bos_token_id": 5,
    "eos_token_id": 255001,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "logit_scale": 0.0625,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "layer_types": None,
}
COHERE = {key: value for key, value in COHERE2.items() if not key.startswith("sliding") and key != "layer_types"} | {
    "use_qk_norm": False
}
JAIS2 = _LAYER_NORM | {
    "layer_norm_eps": 1e-5,
    "hidden_act": "relu2",
    "vocab_size": 150272,
    "hidden_size": 3328,
    "intermediate_size": 26624,
    "num_hidden_layers": 32,
    "num_attention_heads": 26,
    "max_position_embeddings": 8192,
    "bos_token_id": 0,
    "eos_token_id": 150024,
    "attention_bias": True,
    "mlp_bias": True,
}
NEMOTRON = _LAYER_NORM | {
    "norm_eps": 1e-5,
    "hidden_act": "relu2",
    "vocab_size": 256000,
    "hidden_size": 6144,
    "intermediate_size": 24576,
    "num_hidden_layers": 32,
    "num_attention_heads": 48,
    "max_position_embeddings": 4096,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "attention_bias": False,
    "mlp_bias": False,
}
STARCODER2 = _LAYER_NORM | {
    "norm_epsilon": 1e-5,
    "hidden_act": "gelu_pytorch_tanh",
    "vocab_size": 49152,
    "hidden_size": 3072,
    "intermediate_size": 12288,
    "num_hidden_layers": 30,
    "num_attention_heads": 24,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": 50256,
    "eos_token_id": 50256,
    "tie_word_embeddings": True,
    "use_bias": True,
    "sliding_window": None,
}
STABLELM = _LAYER_NORM | {
    "layer_norm_eps": 1e-5,
    "hidden_act": "silu",
    "vocab_size": 50304,
    "hidden_size": 2560,
    "intermediate_size": 6912,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "use_qkv_bias": False,
    "qk_layernorm": False,
    "use_parallel_residual": False,
}
PHI = _LAYER_NORM | {
    "layer_norm_eps": 1e-5,
    "hidden_act": "gelu_new",
    "vocab_size": 51200,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "qk_layernorm": False,
}
GPT2 = {
    "vocab_size": 50257,
    "n_positions": 1024,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_inner": None,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "bos_token_id": 50256,
    "eos_token_id": 50256,
    "tie_word_embeddings": True,
}
GPT2_KEYS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
    "hidden_act": "activation_function",
}
GPT_BIGCODE = {key: value for key, value in GPT2.items() if key != "scale_attn_by_inverse_layer_idx"} | {
    "activation_function": "gelu_pytorch_tanh",
    "multi_query": True,
    "num_key_value_heads": 1,
}
GPTJ = {
    "vocab_size": 50400,
    "n_positions": 2048,
    "n_embd": 4096,
    "n_layer": 28,
    "n_head": 16,
    "n_inner": None,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "rotary_dim": 64,
    "bos_token_id": 50256,
    "eos_token_id": 50256,
    "tie_word_embeddings": False,
}
GPT_NEOX = {
    "vocab_size": 50432,
    "hidden_size": 6144,
    "intermediate_size": 24576,
    "num_hidden_layers": 44,
    "num_attention_heads": 64,
    "hidden_act": "gelu",
    "max_position_embeddings": 2048,
    "layer_norm_eps": 1e-5,
    "attention_bias": True,
    "use_parallel_residual": True,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
OPT = {
    "vocab_size": 50272,
    "hidden_size": 768,
    "ffn_dim": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "activation_function": "relu",
    "max_position_embeddings": 2048,
    "do_layer_norm_before": True,
    "_remove_final_layer_norm": False,
    "word_embed_proj_dim": None,
    "enable_bias": True,
    "layer_norm_elementwise_affine": True,
    "bos_token_id": 2,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}
