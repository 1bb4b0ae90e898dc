"""Makes pipeline/checkpoint/refused_families.py: why each other model type of transformers is not imported.

python -m tests.oracle.make_refusals. Needs transformers of the version in pyproject.toml's group `oracle`, reads its
sources alone. The feature is that of the first rule below whose pattern is in the model's configuration or code.
"""

import re
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from ingot.pipeline.checkpoint.families import FAMILIES
from ingot.pipeline.checkpoint.text_tower import TEXT_TOWERS
from tests.data_paths import ROOT

FILE = ROOT / "pipeline" / "checkpoint" / "refused_families.py"
MAPPINGS = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM")
# Feature -> what shows it: a pattern in the lines of the configuration's class, and one in the model's code.
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
    "recurrent layers": (
        r"ssm|mamba|conv_kernel|linear_(attn|attention|num|key)|block_types|lru_width|attention_hidden_size|conv_L_cache|kda",
        r"class \w*(Mamba|GatedDelta|ShortConv|Recurrent|LightningAttention|mLSTM|RwkvAtt|RWKV)\w*\(",
    ),
    "attention to tokens that an indexer chooses": (r"index_topk|index_n_heads", r"class \w+Indexer\("),
    "mixture of experts": (r"experts|moe_", r"class \w+(Experts|MoE|Moe|SparseMoeBlock)\("),
    "latent attention": (r"kv_lora_rank", r"kv_a_proj|kv_lora_rank"),
    "ALiBi positions": (r"\balibi\b", r"build_\w*alibi|\balibi\b"),
    "sinusoidal or relative positions": ("", ""),
    "inputs of each layer next to the residual stream": (r"per_layer_input|altup", r"AltUp"),
    "differential attention": ("", r"lambda_q1"),
    "attention of another kind": ("", r"HashAttention"),
    "weights of three values": ("", r"BitLinear"),
    "several passes through its layers": (r"_cycles\b", ""),
}
DENSE = "dense, but not among the families yet"
AROUND = ("an audio tower", "a vision tower", "an encoder")
# What no pattern shows, or one shows wrongly.
KNOWN = {
    "an encoder": (
        "albert distilbert esmc eurobert flaubert gte jina_embeddings_v3 modernbert nomic_bert ultrabert xlm "
        "data2vec-text musicgen musicgen_melody"
    ),
    "an audio tower": "kyutai_speech_to_text vibevoice_asr",
    "sinusoidal or relative positions": "cpmant ctrl xglm xlnet",
    "attention of another kind": "blt gpt_neo reformer",
    "recurrent layers": "xlstm",
    "weights of three values": "bitnet",
    DENSE: "biogpt cohere falcon codegen gpt_bigcode gptj gpt-sw3 persimmon",
    "inputs of each layer next to the residual stream": "gemma4_unified_text gemma4_unified_assistant",
}


def main() -> None:
    """Write the file."""
    by_reason: dict[str, list[str]] = {}
    for name in model_types():
        if name not in FAMILIES and name not in TEXT_TOWERS:
            by_reason.setdefault(reason_of(name), []).append(name)
    FILE.write_text(content(by_reason))


def content(by_reason: dict[str, list[str]]) -> str:
    """The module's text."""
    rows = []
    for reason in (*RULES, DENSE):
        if names := sorted(by_reason.get(reason, [])):
            words, line = [f'"{name}"' for name in names], ""
            lines = []
            for word in words:
                if len(line) + len(word) > 105:
                    lines.append(line)
                    line = ""
                line += f"{word}, "
            lines.append(line)
            body = "".join(f"        {text.rstrip()}\n" for text in lines)
            rows.append(f'    "{reason}": (\n{body}    ),\n')
    return HEAD.format(version=version("transformers")) + "".join(rows) + "}\n"


HEAD = '''\
"""Why Ingot does not import other model types of transformers {version}. Made by tests/oracle/make_refusals.py."""

# fmt: off
REFUSED: dict[str, tuple[str, ...]] = {{
'''


def model_types() -> list[str]:
    """Every model type of a text model, or of a model around one."""
    source = (_package() / "models" / "auto" / "modeling_auto.py").read_text()
    found: set[str] = set()
    for mapping in MAPPINGS:
        block = re.search(rf"MODEL_FOR_{mapping}_MAPPING_NAMES = OrderedDict\((.*?)\n\)", source, re.S)
        found.update(re.findall(r'\("([^"]+)", ', block.group(1)) if block else ())
    return sorted(found)


def reason_of(name: str) -> str:
    """The first feature that the configuration or the code of the model type shows."""
    for reason, names in KNOWN.items():
        if name in names.split():
            return reason
    folder, configuration = _configuration(name)
    code = "\n".join(file.read_text() for file in sorted(folder.glob("modeling_*.py")))
    for reason, (fields, classes) in RULES.items():
        if reason in AROUND and name.endswith("_text"):
            continue  # the folder has the code of the model around it
        if (fields and re.search(fields, configuration)) or (classes and re.search(classes, code)):
            return reason
    return DENSE


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
