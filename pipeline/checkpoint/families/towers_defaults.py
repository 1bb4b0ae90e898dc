"""Defaults of the text models within multimodal ones, as in rms_norm_defaults.py."""

from ingot.pipeline.checkpoint.families.mixtures_defaults import GLM4_MOE
from ingot.pipeline.checkpoint.families.rms_norm_defaults import GLM4, QWEN2, SILU

QWEN2_VL = QWEN2 | {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_window_layers": 80,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
QWEN3_VL = SILU | {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 128000,
    "bos_token_id": None,
    "eos_token_id": None,
    "attention_bias": False,
}
QWEN3_VL_MOE = QWEN3_VL | {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": None,
    "tie_word_embeddings": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "moe_intermediate_size": 1408,
    "num_experts": 60,
    "num_experts_per_tok": 4,
}
GLM4V = {key: value for key, value in GLM4.items() if key not in ("attention_bias", "head_dim")} | {
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
}
GLM4V_MOE = {
    key: value for key, value in GLM4_MOE.items() if key not in ("use_qk_norm", "num_nextn_predict_layers")
} | {
    "vocab_size": 151424,
    "max_position_embeddings": 65536,
    "attention_bias": True,
}
