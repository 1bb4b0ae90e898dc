"""The text model within a multimodal checkpoint: its configuration and its tensors, under the names of a text model.

A model around a text model has its configuration under text_config (older ones: at the top level), and its tensors
between those of a vision or audio tower and a projector, which are left aside:

model.language_model.layers.0...       model.vision_tower...       lm_head.weight
language_model.model.layers.0...       vision_tower...             language_model.lm_head.weight
model.layers.0...                      visual...                   lm_head.weight

With text alone, such a model computes what its text model does: positions of several axes (mrope) are equal there. So
any model is imported whose text_config is of a known family, unless CHANGED says that it computes something else.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

from ingot.errors import CheckpointError, ConfigError, one_of, shown
from ingot.pipeline.checkpoint.families import FAMILIES
from ingot.pipeline.checkpoint.formats.quantized_folder import KEYS

# model_type of a model around a text model -> model_type of its text model, for a text_config without one, and for
# older files with the text model's keys at the top level.
TEXT_TOWERS: Mapping[str, str] = MappingProxyType(
    {
        "audioflamingo3": "qwen2",
        "aya_vision": "cohere2",
        "cohere2_vision": "cohere2",
        "deepseek_vl": "llama",
        "deepseek_vl_hybrid": "llama",
        "exaone4_5": "exaone4",
        "gemma3": "gemma3_text",
        "gemma3n": "gemma3n_text",
        "gemma4": "gemma4_text",
        "gemma4_unified": "gemma4_unified_text",
        "glm46v": "glm4v_text",
        "glm4v": "glm4v_text",
        "glm4v_moe": "glm4v_moe_text",
        "glmasr": "llama",
        "got_ocr2": "qwen2",
        "granite_speech": "granite",
        "granite_speech_plus": "granite",
        "idefics2": "mistral",
        "idefics3": "llama",
        "internvl": "qwen2",
        "janus": "llama",
        "lighton_ocr": "qwen3",
        "llava": "llama",
        "llava_next": "llama",
        "llava_next_video": "llama",
        "llava_onevision": "qwen2",
        "mistral3": "mistral",
        "moss_transcribe_diarize": "qwen3",
        "musicflamingo": "qwen2",
        "ovis2": "qwen2",
        "pp_chart2table": "qwen2",
        "qianfan_ocr": "qwen3",
        "qwen2_5_vl": "qwen2_5_vl_text",
        "qwen2_audio": "qwen2",
        "qwen2_vl": "qwen2_vl_text",
        "qwen3_5": "qwen3_5_text",
        "qwen3_5_moe": "qwen3_5_moe_text",
        "qwen3_asr": "qwen3",
        "qwen3_vl": "qwen3_vl_text",
        "qwen3_vl_moe": "qwen3_vl_moe_text",
        "smolvlm": "llama",
        "vibevoice_asr": "qwen2",
        "video_llama_3": "qwen2",
        "video_llava": "llama",
        "vipllava": "llama",
        "voxtral": "llama",
    }
)
# model_type of a model around a text model -> what it does that its text model does not.
CHANGED: Mapping[str, str] = MappingProxyType(
    {
        "cosmos3_omni": "weights of two branches in each layer",
        "gemma4_unified_assistant": "keys and values of another model",
        "jev": "scores of given answers as its result",
        "paligemma": "attention both ways within its prompt",
        "shieldgemma2": "a verdict on a picture as its result",
        "vibevoice": "sound as its result",
    }
)
_TEXT, _THINKER = "text_config", "thinker_config"
_OF_BOTH = ("dtype", "torch_dtype", "bos_token_id", "eos_token_id", *KEYS)  # keys that the outer object decides
_T = TypeVar("_T")


@dataclass(frozen=True)
class TextTower:
    """The text model of a multimodal checkpoint.

    model_type   that of the model around it
    config       config.json's keys as a text model has them
    names        tensor of the text model -> its name in the checkpoint
    left_aside   module -> its tensors that are not read
    """

    model_type: str
    config: Mapping[str, Any]
    names: Mapping[str, str]
    left_aside: Mapping[str, int]

    def of_text(self, tensors: Mapping[str, _T]) -> dict[str, _T]:
        """Return the tensors of the text model, under its names."""
        return {name: tensors[stored] for name, stored in self.names.items() if stored in tensors}

    @property
    def note(self) -> str:
        """A sentence that says what is imported and what is left aside."""
        aside = ", ".join(f"{module} ({count} tensors)" for module, count in sorted(self.left_aside.items()))
        return (
            f"the checkpoint is a {self.model_type} model; its text model ({self.config['model_type']}) is imported"
            + (f", {aside} left aside" if aside else "")
        )


def text_config(config: Mapping[str, Any], place: str) -> dict[str, Any] | None:
    """The text model's configuration within that of a multimodal model; None for other models.

    ConfigError for a text_config that is not an object.
    """
    outer = config.get("model_type")
    inner = config.get(_THINKER, config)  # a model that speaks has one that thinks, around the text model
    text = inner.get(_TEXT) if isinstance(inner, dict) else None
    if not isinstance(outer, str) or outer in FAMILIES or (text is None and outer not in TEXT_TOWERS):
        return None
    if outer in CHANGED:
        raise ConfigError(
            f"{place}: model_type is {shown(outer)}, which Ingot does not import: it has {CHANGED[outer]}"
        )
    if text is None:  # older: the text model's keys next to vision_config
        return {**config, "model_type": TEXT_TOWERS[outer]}
    if not isinstance(text, dict):
        raise ConfigError(f"{place}: {_TEXT} is {shown(text)}; it must be an object")
    shared = {key: given[key] for given in (inner, config) for key in _OF_BOTH if given.get(key) is not None}
    return {**text, **shared, "model_type": text.get("model_type", TEXT_TOWERS.get(outer))}


def read_tower(config: Mapping[str, Any], text: Mapping[str, Any], tensors: Collection[str], place: str) -> TextTower:
    """Find the text model's tensors among `tensors`, which are plain names of weights.

    The head is tied where none is stored and no key says otherwise; defaults of transformers differ between models.
    CheckpointError when there is no embedding of a text model, or more than one.
    """
    names = FAMILIES[str(text["model_type"])].names
    decoder, embedding, head = (names.get(part, part) for part in ("model", "embed_tokens", "lm_head"))
    every = tensors
    if _THINKER in config:
        tensors = [name for name in tensors if name.startswith("thinker.")]
    prefix = _prefix(tensors, f"{embedding}.weight", place)
    found = {f"{decoder}.{name.removeprefix(prefix)}": name for name in tensors if name.startswith(prefix)}
    heads = [name for name in tensors if f".{name}".endswith((".lm_head.weight", ".lm_head.bias"))]
    found |= {f"{head}.{name.rpartition('.')[2]}": name for name in heads}
    rest = set(every) - set(found.values())
    ties = [given["tie_word_embeddings"] for given in (config, text) if "tie_word_embeddings" in given]
    own = {**text, "tie_word_embeddings": not heads and (not ties or any(ties))}
    return TextTower(str(config["model_type"]), own, found, Counter(map(_module, rest)))


def _prefix(tensors: Iterable[str], embedding: str, place: str) -> str:
    """Return the prefix of the names of the text model's tensors."""
    found = [name.removesuffix(embedding) for name in tensors if f".{name}".endswith(f".{embedding}")]
    if len(found) != 1:
        says = "no tensor" if not found else f"several tensors ({one_of(found)})"
        raise CheckpointError(
            f"{place}: {says} named {shown(f'...{embedding}')}, the embedding of the text model; download the whole "
            "checkpoint, or name that of the text model alone"
        )
    return found[0]


def _module(name: str) -> str:
    """The part of the model that a tensor belongs to: vision_tower of model.vision_tower.encoder.layers..."""
    first, *others = name.split(".")
    return others[0] if first == "model" and others else first
