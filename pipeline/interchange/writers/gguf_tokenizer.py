"""GGUF's tokenizer metadata, for byte-level BPE tokenizers that llama.cpp splits text like.

tokens, types, merges    from tokenizer.json
add_bos_token, ...       from its post-processor
end tokens               all of them: the tokenizer's own as eos, others as eot and eom
chat templates           the default one, others by name
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ingot.errors import UsageError
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.checkpoint.config.decoder import DecoderConfig
from ingot.pipeline.checkpoint.gguf import END_TOKENS
from ingot.runtime.text.tokenizer import Tokenizer

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
# The pattern that splits text before merging -> its name in llama.cpp.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {_LLAMA3: "llama-bpe", _LLAMA3.replace("{1,3}", ""): "qwen2"}


def tokenizer_metadata(checkpoint: Checkpoint, config: DecoderConfig) -> dict[str, Any]:
    """Return metadata by key, nothing without a tokenizer.json. UsageError for a tokenizer of another kind."""
    file = checkpoint.folder / "tokenizer.json"
    if not file.is_file():
        return {}
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    model, added = tokenizer["model"], tokenizer.get("added_tokens") or []
    pattern = _split_name(tokenizer.get("pre_tokenizer")) if model.get("type") == "BPE" else None
    if pattern is None or tokenizer.get("normalizer") not in (None, {"type": "NFC"}):
        raise UsageError(
            f"{file}: gguf is written with byte-level BPE tokenizers that split like gpt-2, llama-3 or qwen2; this one "
            "splits differently; export to compressed-tensors, gptq or awq"
        )
    read = Tokenizer.load(checkpoint.folder, checkpoint.readable, checkpoint.chat_template)
    tokens, types = _vocabulary(model["vocab"], added, config.vocab_size)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    found = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pattern,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        **_ends(read, config, file),
        **_chat_templates(read.chat_templates),
    }
    return {key: value for key, value in found.items() if value not in (None, [])}


def _ends(tokenizer: Tokenizer, config: DecoderConfig, file: Path) -> dict[str, Any]:
    """Return the tokens at both ends of a text, and which of them encoding adds.

    UsageError for a post-processor that adds others, and for more end tokens than llama.cpp has keys for.
    """
    plain, whole = tokenizer.encode("a", add_special_tokens=False), tokenizer.encode("a")
    start = next((at for at in range(len(whole)) if whole[at : at + len(plain)] == plain), len(whole))
    before, after = whole[:start], whole[start + len(plain) :]
    bos = before[0] if before else config.bos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    first = after[0] if after else tokenizer.eos_token_id
    ends = list(dict.fromkeys([*([] if first is None else [first]), *config.eos_token_ids, *tokenizer.eos_token_ids]))
    if len(before) > 1 or len(after) > 1:
        raise UsageError(
            f"{file}: its post_processor adds {before} before a text and {after} after it, and gguf one token at each "
            "end; export to compressed-tensors, gptq or awq"
        )
    if len(ends) > len(END_TOKENS):
        raise UsageError(
            f"{file.parent}: the model has the end tokens {ends}, and gguf holds {len(END_TOKENS)}; remove some from "
            "eos_token_id of generation_config.json, or export to another format"
        )
    adds = {"tokenizer.ggml.add_bos_token": bool(before), "tokenizer.ggml.add_eos_token": bool(after)}
    return {"tokenizer.ggml.bos_token_id": bos, **dict(zip(END_TOKENS, ends, strict=False)), **adds}


def _chat_templates(templates: Mapping[str, str]) -> dict[str, Any]:
    """Return the default template and the others, whose names llama.cpp finds in a list."""
    others = sorted(name for name in templates if name != "default")
    found: dict[str, Any] = {"tokenizer.chat_template": templates.get("default"), "tokenizer.chat_templates": others}
    return {**found, **{f"tokenizer.chat_template.{name}": templates[name] for name in others}}


def _split_name(pre_tokenizer: Any) -> str | None:
    """Return llama.cpp's name for the way the text is split; None for an unknown one."""
    match pre_tokenizer:
        case {"type": "ByteLevel", "use_regex": True, "add_prefix_space": False}:
            return "gpt-2"
        case {"type": "Sequence", "pretokenizers": [{"type": "Split", "pattern": {"Regex": str(regex)}}, *_]}:
            return _SPLITS.get(regex)
        case _:
            return None


def _vocabulary(vocab: dict[str, int], added: list[dict[str, Any]], size: int) -> tuple[list[str], list[int]]:
    """Return tokens and their types in the order of ids; an id without a token is unused."""
    tokens, types = [f"[unused{index}]" for index in range(size)], [_UNUSED] * size
    for token, index in vocab.items():
        tokens[index], types[index] = token, _NORMAL
    for entry in added:
        tokens[entry["id"]] = entry["content"]
        types[entry["id"]] = _CONTROL if entry.get("special") else _USER_DEFINED
    return tokens, types
