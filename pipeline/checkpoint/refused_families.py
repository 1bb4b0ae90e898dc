"""Why Ingot does not import other model types of transformers 5.23.0. Made by tests/oracle/make_refusals.py."""

# fmt: off
REFUSED: dict[str, tuple[str, ...]] = {
    "an audio tower": (
        "dots3_note", "fun_asr_nano", "inkling_mm_model", "kyutai_speech_to_text", "moshi", "muse_spark",
        "nemo_speechlm", "nemotron_h_omni", "phi4_multimodal", "qwen2_5_omni_thinker", "qwen3_omni_moe_thinker",
        "voxtral_realtime",
    ),
    "a vision tower": (
        "aria", "blip", "blip-2", "chameleon", "cohere_compass", "cosmos3_edge", "cosmos3_omni", "deepseek_ocr2",
        "diffusion_gemma", "emu3", "ernie4_5_vl_moe", "fast_vlm", "florence2", "fuyu", "git", "glm5_next",
        "glm_ocr", "glmga", "granite4_vision", "granite_docling", "hunyuan_vl", "hyperclovax_vision_v2",
        "idefics", "inkling2", "instructblip", "instructblipvideo", "kimi_k25", "kosmos-2", "kosmos-2.5",
        "lfm2_vl", "lfm3_vl", "llama4", "minicpm_ocr", "minicpmv4_6", "minicpmv4_7", "minimax_m3_vl",
        "mistral_large4", "mllama", "modernvbert", "molmo2", "muse_glimmer", "neomme", "paddleocr_vl",
        "paligemma", "perception_lm", "pi0", "pix2struct", "pp_formulanet", "qwen4_exp", "shieldgemma2",
        "step3p7", "t5gemma2", "ultravbert", "unlimited_ocr",
    ),
    "an encoder": (
        "albert", "bart", "bert", "bert-generation", "big_bird", "bigbird_pegasus", "blenderbot",
        "blenderbot-small", "camembert", "convbert", "data2vec-text", "deberta", "deberta-v2", "distilbert",
        "electra", "encoder-decoder", "ernie", "esm", "esmc", "eurobert", "evolla", "flaubert", "fnet", "fsmt",
        "funnel", "gte", "ibert", "jina_embeddings_v3", "layoutlm", "led", "longformer", "longt5", "luke",
        "m2m_100", "marian", "mbart", "megatron-bert", "mobilebert", "modernbert", "mpnet", "mra", "mt5",
        "musicgen", "musicgen_melody", "mvp", "nllb-moe", "nomic_bert", "nystromformer", "pegasus", "pegasus_x",
        "perceiver", "plbart", "prophetnet", "qwen2_5_omni", "qwen3_omni_moe", "rembert", "roberta",
        "roberta-prelayernorm", "roc_bert", "roformer", "seamless_m4t", "seamless_m4t_v2", "squeezebert",
        "switch_transformers", "t5", "t5gemma", "tapas", "trocr", "udop", "ultrabert", "umt5",
        "vision-encoder-decoder", "whisper", "xlm", "xlm-roberta", "xlm-roberta-xl", "xmod", "yoso",
    ),
    "recurrent layers": (
        "bailing_hybrid", "falcon_mamba", "inkling2_text", "inkling_text", "jamba", "kimi_linear", "lfm3",
        "mamba", "mamba2", "minimax", "qwen4_exp_text", "recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2",
    ),
    "attention to tokens that an indexer chooses": (
        "axk2", "deepseek_v32", "deepseek_v4", "dots3_note_text", "glm_moe_dsa", "hy_v4", "minimax_m3_vl_text",
    ),
    "mixture of experts": (
        "aria_text", "axk1", "beam", "cohere2_moe", "dbrx", "doge", "flint", "gemma4_assistant", "jetmoe",
        "kolibri1", "laguna", "llama4_text", "longcat_flash", "mimo_v2_flash", "phimoe", "zaya",
    ),
    "ALiBi positions": (
        "bloom", "mpt",
    ),
    "sinusoidal or relative positions": (
        "cpmant", "ctrl", "xglm", "xlnet",
    ),
    "inputs of each layer next to the residual stream": (
        "gemma4_unified_assistant",
    ),
    "differential attention": (
        "diffllama",
    ),
    "attention of another kind": (
        "blt", "gpt_neo", "reformer",
    ),
    "weights of three values": (
        "bitnet",
    ),
    "several passes through its layers": (
        "hrm_text",
    ),
    "dense, but not among the families yet": (
        "biogpt", "codegen", "cohere_compass_text", "falcon", "gpt-sw3", "gpt_bigcode", "gpt_neox_japanese",
        "gptj", "internlm3", "modernbert-decoder", "nanochat", "olmo", "openai-gpt", "persimmon",
    ),
}
