"""GGUF's tokenizer metadata from tokenizer.json, for byte-level BPE tokenizers that llama.cpp splits text like."""

import json
from typing import Any

from ingot.errors import UsageError
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.checkpoint.config.decoder import DecoderConfig

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
    tokens, types = _vocabulary(model["vocab"], added, config.vocab_size)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    found = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pattern,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": config.bos_token_id,
        "tokenizer.ggml.eos_token_id": config.eos_token_ids[0] if config.eos_token_ids else None,
        "tokenizer.ggml.add_bos_token": False,
    }
    return {key: value for key, value in found.items() if value not in (None, [])}


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
