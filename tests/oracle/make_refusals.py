"""Write pipeline/checkpoint/families/refused.json: why each other model type of transformers is not imported.

Next to it, around.json: the text model of each model type around one that is imported. docs/model-types.md shows both
with the families.

python -m tests.oracle.make_refusals. Needs transformers of the version in pyproject.toml's group `oracle`, reads its
sources and configurations alone. The tables below name each model's feature by a pattern that is in its configuration
or code.
"""

import re
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ingot.pipeline.checkpoint.config.text_tower import CHANGED
from ingot.pipeline.checkpoint.families import FAMILIES
from ingot.pipeline.checkpoint.json_files import write_json
from tests.data_paths import ROOT

FILE = ROOT / "pipeline/checkpoint/families/refused.json"
AROUND_FILE = ROOT / "pipeline/checkpoint/families/around.json"
DOC = ROOT / "docs/model-types.md"
MAPPINGS = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM")
# What every model of a kind has -> what shows it: a pattern in the lines of the configuration's class, and one in the
# model's code. The first that is found counts.
RULES: dict[str, tuple[str, str]] = {
    "an audio tower": (
        r"\baudio_config\b|\baudio_encoder_config\b|\bencoder_config\b.*audio",
        r"class \w+AudioModel\(",
    ),
    "a vision tower": (
        r"\bvision_config\b|\bvq_config\b|\bvision_tower\b|\bimage_token_id\b",
        r"class \w+VisionModel\(",
    ),
    "an encoder": (
        r"is_encoder_decoder: bool = True|\bencoder_layers\b|\bdecoder_start_token_id\b",
        r"class \w+Encoder\(",
    ),
    "attention to tokens that an indexer chooses": (r"index_topk|index_n_heads", r"class \w+Indexer\("),
    "ALiBi positions": (r"\balibi\b", r"build_\w*alibi|\balibi\b"),
}
AROUND = ("an audio tower", "a vision tower", "an encoder")
# What no pattern shows, or one shows wrongly.
KNOWN = {
    "an encoder": (
        "albert distilbert esmc eurobert flaubert gte jina_embeddings_v3 modernbert nomic_bert ultrabert xlm "
        "data2vec-text musicgen musicgen_melody"
    ),
    "an audio tower": "kyutai_speech_to_text vibevoice_asr",
}
# The feature of a model that Ingot lacks -> the models, and the pattern that shows it in the configuration or the code
# of each. Of several such features the one that takes most work.
LACKS: dict[str, tuple[str, str]] = {
    "Mamba-1 layers": ("falcon_mamba jamba mamba zamba", r"\bx_proj(_weight)?\b"),
    "no attention": ("mamba2", r"self\.mixer = Mamba2Mixer\("),
    "RG-LRU layers": ("recurrent_gemma", r"class \w+Rglru\("),
    "RWKV layers": ("rwkv", r"class RwkvSelfAttention\("),
    "mLSTM layers": ("xlstm", r"\bmLSTM"),
    "lightning attention": ("minimax", r"class \w+LightningAttention\("),
    "a decay for each dimension of a key": ("bailing_hybrid kimi_linear", r"class \w+ForgetGate\("),
    "windows next to recurrent layers": ("lfm3", r"\bsliding_window\b"),
    "layers that share an attention's weights": ("zamba2", r"use_shared_attention_adapter"),
    "hyper-connections": ("qwen4_exp_text", r"\bhc_count\b"),
    "a router with a bias of its logits in the choice alone": (
        "kolibri1",
        r"router_logits \+ self\.e_score_correction_bias",
    ),
    "a mixture of attention heads": ("jetmoe", r"class \w+MoA\("),
    "a mean of routed and shared experts": ("cohere2_moe", r"shared_expert_combination_strategy"),
    "a norm after experts alone": ("axk1", r"self\.post_mlp_layernorm\(hidden_states\)"),
    "two attentions in a layer": ("longcat_flash", r"self\.self_attn = nn\.ModuleList"),
    "attention within chunks of a text": ("llama4_text", r"\battention_chunk_size\b"),
    "values narrower than keys": ("mimo_v2_flash", r"\bv_head_dim\b"),
    "attention with a mask made of its values": ("doge", r"def prepare_dynamic_mask\("),
    "attention with softplus gates": ("laguna", r"softplus\(self\.g_proj"),
    "queries and keys that a convolution makes": ("zaya", r"\bconv_qk_depthwise\b"),
    "differential attention": ("diffllama", r"\blambda_q1\b"),
    "attention by hashes": ("reformer", r"class LSHSelfAttention\("),
    "keys and values of another model": ("gemma4_assistant gemma4_unified_assistant", r"\bshared_kv_states\b"),
    "a residual stream that is scaled by depth": ("beam", r"def depth_scaled_residual_add\("),
    "a norm of the embeddings": ("modernbert-decoder", r"self\.norm\(self\.tok_embeddings\("),
    "a bias of the last layer alone": ("gpt_neox_japanese", r"\bdense_bias\b"),
    "relative positions": ("cpmant inkling2_text inkling_text xlnet", r"RelativeLogits|position_bias_num|RelativeAtt"),
    "sinusoidal positions": ("ctrl", r"Sinusoidal|def angle_defn\("),
    "patches of bytes in place of tokens": ("blt", r"class BltPatcher\("),
    "several passes through its layers": ("hrm_text", r"_cycles\b"),
}
# Models without a feature that Ingot lacks: a row of the table is all that is missing.
_HEAD = """# Model types

Text models and models around one, in transformers {version} and in Ingot: {count} model types.
{counts}.

[Models](models.md) says what each family computes, and by which rule a text model within another is read. This page is
written by `python -m tests.oracle.make_refusals`; `ingot models NAME` says the same.

| model_type | read | what it has that Ingot lacks |
|---|---|---|"""
ROW = "nothing that Ingot lacks, but it is not among the families yet"
ROWS = "aria_text cohere_compass_text flint gpt-sw3"
OTHER = "no place among the families yet"


def main() -> None:
    """Write the files."""
    write_json(FILE, refusals())
    write_json(AROUND_FILE, towers())
    DOC.write_text(page(), encoding="utf-8")


def page() -> str:
    """The table of all model types, as Markdown."""
    refused, around = {**refusals(), **CHANGED}, towers()
    names = sorted({*refused, *around, *FAMILIES})
    lines = [
        f"| `{name}` | {_read(name, around)} | {'' if name in FAMILIES or name in around else refused[name]} |"
        for name in names
    ]
    counts = f"{len(FAMILIES)} are families, the text model of {len(around)} is read, {len(refused)} are refused"
    return "\n".join([_HEAD.format(count=len(names), counts=counts, version=version("transformers")), *lines, ""])


def _read(name: str, around: dict[str, str]) -> str:
    if name in FAMILIES:
        return "yes"
    return f"its text model, `{around[name]}`" if name in around else "no"


def refusals() -> dict[str, str]:
    """Model type -> the feature that keeps it from being imported."""
    names = (name for name in model_types() if name not in FAMILIES and name not in towers())
    return {name: reason_of(name) for name in names}


@cache
def towers() -> dict[str, str]:
    """Model type of a model around a text model that is imported -> the text model's."""
    found = {name: text for name in CONFIG_MAPPING if (text := _text_type(name)) and text in FAMILIES}
    return {name: found[name] for name in sorted(found) if name not in CHANGED and name not in FAMILIES}


def _text_type(name: str) -> str | None:
    """The model type of a default configuration's text_config; None without one."""
    names = CONFIG_MAPPING[name].sub_configs
    if "text_config" not in names and "thinker_config" not in names:
        return None
    try:
        config = CONFIG_MAPPING[name]()
    except (ValueError, StrictDataclassError):  # it has no defaults
        return None
    text = getattr(getattr(config, "thinker_config", config), "text_config", None)
    return None if text is None else str(text.model_type)


def model_types() -> list[str]:
    """Every model type of a text model, or of a model around one."""
    source = (_package() / "models" / "auto" / "modeling_auto.py").read_text()
    found: set[str] = set()
    for mapping in MAPPINGS:
        block = re.search(rf"MODEL_FOR_{mapping}_MAPPING_NAMES = OrderedDict\((.*?)\n\)", source, re.S)
        found.update(re.findall(r'\("([^"]+)", ', block.group(1)) if block else ())
    return sorted(found)


def reason_of(name: str) -> str:
    """The feature that keeps the model type from being imported, checked against its configuration and code."""
    for reason, names in KNOWN.items():
        if name in names.split():
            return reason
    if name in ROWS.split():
        return ROW
    folder, configuration = _configuration(name)
    code = "\n".join(file.read_text() for file in sorted(folder.glob("modeling_*.py")))
    for reason, (names, pattern) in LACKS.items():
        if name in names.split():
            assert re.search(pattern, configuration) or re.search(pattern, code), f"{name} does not show {reason}"
            return reason
    for reason, (fields, classes) in RULES.items():
        if reason in AROUND and name.endswith("_text"):
            continue  # the folder has the code of the model around it
        if re.search(fields, configuration) or re.search(classes, code):
            return reason
    return OTHER


def _configuration(name: str) -> tuple[Path, str]:
    """The model's folder, and the text of its configuration's class without docstring."""
    for file in _configuration_files():
        text = file.read_text()
        for block in re.split(r"\n(?=@|class )", text):
            if re.search(rf'model_type = "{re.escape(name)}"', block):
                return file.parent, re.sub(r'r?""".*?"""', "", block, flags=re.S)
    return _package() / "models" / name.replace("-", "_"), ""


def _configuration_files() -> Iterator[Path]:
    yield from sorted((_package() / "models").glob("*/configuration_*.py"))


def _package() -> Path:
    spec = find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


if __name__ == "__main__":
    main()
