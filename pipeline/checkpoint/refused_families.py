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
    "attention to tokens that an indexer chooses": (
        "axk2", "deepseek_v32", "deepseek_v4", "dots3_note_text", "glm_moe_dsa", "hy_v4", "minimax_m3_vl_text",
    ),
    "ALiBi positions": (
        "bloom", "mpt",
    ),
    "Mamba-1 layers": (
        "falcon_mamba", "jamba", "mamba", "zamba",
    ),
    "no attention": (
        "mamba2",
    ),
    "RG-LRU layers": (
        "recurrent_gemma",
    ),
    "RWKV layers": (
        "rwkv",
    ),
    "mLSTM layers": (
        "xlstm",
    ),
    "lightning attention": (
        "minimax",
    ),
    "a decay for each dimension of a key": (
        "bailing_hybrid", "kimi_linear",
    ),
    "windows next to recurrent layers": (
        "lfm3",
    ),
    "layers that share an attention's weights": (
        "zamba2",
    ),
    "hyper-connections": (
        "qwen4_exp_text",
    ),
    "SparseMixer routing": (
        "phimoe",
    ),
    "a router with a bias of its logits in the choice alone": (
        "kolibri1",
    ),
    "a mixture of attention heads": (
        "jetmoe",
    ),
    "a mean of routed and shared experts": (
        "cohere2_moe",
    ),
    "a norm after experts alone": (
        "axk1",
    ),
    "two attentions in a layer": (
        "longcat_flash",
    ),
    "clamped queries, keys and values": (
        "dbrx",
    ),
    "attention within chunks of a text": (
        "llama4_text",
    ),
    "values narrower than keys": (
        "mimo_v2_flash",
    ),
    "attention with a mask made of its values": (
        "doge",
    ),
    "attention with softplus gates": (
        "laguna",
    ),
    "queries and keys that a convolution makes": (
        "zaya",
    ),
    "differential attention": (
        "diffllama",
    ),
    "attention by hashes": (
        "reformer",
    ),
    "keys and values of another model": (
        "gemma4_assistant", "gemma4_unified_assistant",
    ),
    "a residual stream that is scaled by depth": (
        "beam",
    ),
    "norms of the residual stream itself": (
        "openai-gpt",
    ),
    "norms without weights": (
        "nanochat", "olmo",
    ),
    "a norm of the embeddings": (
        "modernbert-decoder",
    ),
    "a bias of the last layer alone": (
        "gpt_neox_japanese",
    ),
    "queries, keys and values fused by groups of heads": (
        "codegen", "falcon",
    ),
    "relative positions": (
        "cpmant", "inkling2_text", "inkling_text", "xlnet",
    ),
    "sinusoidal positions": (
        "ctrl", "xglm",
    ),
    "patches of bytes in place of tokens": (
        "blt",
    ),
    "norms in front of o_proj and down_proj": (
        "bitnet",
    ),
    "several passes through its layers": (
        "hrm_text",
    ),
    "nothing that Ingot lacks, but it is not among the families yet": (
        "aria_text", "biogpt", "cohere_compass_text", "flint", "gpt-sw3", "gpt_neo", "internlm3", "persimmon",
    ),
}
