"""Bounds on how a tokenizer.json changes the length of a text, read from the file before any text is encoded.

Two questions: how many characters can one token represent (`max_chars_per_token`, so that an engine refuses a text that
cannot fit its context without encoding it), and how many times longer can the normalizer make a text
(`max_growth`, because a normalizer that doubles a text thirty times needs all memory). Both count characters.
"""

from collections.abc import Callable, Mapping
from math import ceil
from typing import Any

from ingot.runtime.text.detokenizer import byte_alphabet
from ingot.runtime.text.precompiled_map import longest_replacement

_Step = Mapping[str, Any]

# The most characters that one character becomes (Unicode 16: U+FDFA has 18 in NFKD) and, where characters are composed,
# the most that one represents (U+1F82 and others decompose into 4).
_GROWTH = {
    "NFC": 3,
    "NFD": 4,
    "NFKC": 18,
    "NFKD": 18,
    "Lowercase": 3,
    "ByteLevel": 4,
    "BertNormalizer": 12,  # decomposed, with a space on both sides of a Chinese character
}
_COMPOSED = {"NFC": 4, "NFKC": 4}
_KEEPS_ALL = {"NFD", "NFKD", "Lowercase", "ByteLevel", "Prepend"}
_PRE_TOKENIZERS_THAT_KEEP_ALL = {"ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "FixedLength"}
NORMALIZERS = (*_GROWTH, "Nmt", "Precompiled", "Prepend", "Replace", "Sequence", "Strip", "StripAccents")


def max_chars_per_token(document: Mapping[str, Any]) -> int | None:
    """The most characters of a text that one token can represent; None where that has no bound.

    It has none where text may be dropped (a normalizer that strips, a pre-tokenizer that removes white space, added
    tokens that absorb the white space around them) and where a run of unknown characters becomes one token.
    """
    normalizer, added = document.get("normalizer"), document.get("added_tokens") or []
    composed = _composed(normalizer)
    longest = _longest_entry(document.get("model") or {}, _is_byte_level(document))
    absorbs = any(token.get("lstrip") or token.get("rstrip") for token in added)
    if composed is None or longest is None or absorbs or not _keeps_all(document.get("pre_tokenizer")):
        return None
    growth = max_growth(normalizer)
    lengths = [len(token["content"]) * (growth if token.get("normalized") else 1) for token in added]
    return ceil(max([longest, *lengths]) * composed) or None


def max_growth(normalizer: object) -> float:
    """The most times longer that the normalizer makes a text, for each of its characters.

    Raises ValueError, with the problem, for a Precompiled normalizer whose map is damaged.
    """
    step = normalizer if isinstance(normalizer, dict) else {}
    kind = str(step.get("type"))
    if kind == "Sequence":
        growth = 1.0
        for part in step.get("normalizers") or []:
            growth *= max_growth(part)
        return growth
    rule = _GROWTH_RULES.get(kind)
    return rule(step) if rule else float(_GROWTH.get(kind, 1))


def _replace_growth(step: _Step) -> float:
    content = len(step.get("content") or "")
    literal = (step.get("pattern") or {}).get("String")
    if literal:
        return max(1.0, content / len(literal))
    return 1.0 + 2 * content  # a pattern may match before, and in place of, every character


def _prepend_growth(step: _Step) -> float:
    return 1.0 + len(step.get("prepend") or "")  # each part between added tokens begins with it


def _precompiled_growth(step: _Step) -> float:
    return float(max(1, longest_replacement(step.get("precompiled_charsmap") or "")))


_GROWTH_RULES: Mapping[str, Callable[[_Step], float]] = {
    "Precompiled": _precompiled_growth,
    "Prepend": _prepend_growth,
    "Replace": _replace_growth,
}


def _composed(normalizer: object) -> float | None:
    """The most characters that one normalized character represents; None where characters may be dropped."""
    step = normalizer if isinstance(normalizer, dict) else {}
    kind = str(step.get("type"))
    if not step or kind in _KEEPS_ALL:
        return 1.0
    if kind == "Sequence":
        composed = 1.0
        for part in step.get("normalizers") or []:
            of_part = _composed(part)
            if of_part is None:
                return None
            composed *= of_part
        return composed
    if kind == "Replace":
        literal, content = (step.get("pattern") or {}).get("String"), step.get("content")
        return max(1.0, len(literal) / len(content)) if literal and content else None
    return float(_COMPOSED[kind]) if kind in _COMPOSED else None


def _keeps_all(pre_tokenizer: object) -> bool:
    """Whether every character of the text reaches the model."""
    step = pre_tokenizer if isinstance(pre_tokenizer, dict) else {}
    kind = str(step.get("type"))
    if kind == "Sequence":
        return all(map(_keeps_all, step.get("pretokenizers") or []))
    if kind in ("Split", "Punctuation"):
        return step.get("behavior") != "Removed"
    return not step or kind in _PRE_TOKENIZERS_THAT_KEEP_ALL


def _is_byte_level(document: Mapping[str, Any]) -> bool:
    return any(_contains_byte_level(document.get(key)) for key in ("normalizer", "pre_tokenizer"))


def _contains_byte_level(step: object) -> bool:
    if not isinstance(step, dict):
        return False
    parts = [*(step.get("normalizers") or []), *(step.get("pretokenizers") or [])]
    return step.get("type") == "ByteLevel" or any(map(_contains_byte_level, parts))


def _longest_entry(model: _Step, byte_level: bool) -> int | None:
    """Characters of the longest entry; None where a character may give no token, or share the unknown one."""
    vocabulary = model.get("vocab") or {}
    entries = set(vocabulary if isinstance(vocabulary, dict) else (entry[0] for entry in vocabulary))
    if not entries or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return None
    has_bytes = model.get("byte_fallback") is True and all(f"<0x{byte:02X}>" in entries for byte in range(256))
    if model.get("type") == "Unigram":
        return max(map(len, entries)) if has_bytes else None
    if model.get("type") != "BPE":
        return None
    has_alphabet = byte_level and byte_alphabet().keys() <= entries
    has_unknown = model.get("unk_token") in entries and not model.get("fuse_unk")
    return max(map(len, entries)) if has_bytes or has_alphabet or has_unknown else None
