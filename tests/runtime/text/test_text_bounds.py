"""Bounds of a tokenizer.json: no token represents more characters, and no normalizer grows a text more, than stated."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.runtime.text.detokenizer import byte_alphabet
from ingot.runtime.text.text_bounds import max_chars_per_token, max_growth
from tests.data_paths import DEMO_MODEL, shared_data
from tests.each_case import each_case

LETTERS = ["<unk>", "a", "b", "aa", "▁", "▁a", "é"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PREPEND = {"type": "Prepend", "prepend": "▁"}
SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
COLLAPSE = {"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}
STRIP = {"type": "Strip", "strip_left": True, "strip_right": True}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
NFC: dict[str, Any] = {"type": "NFC"}


def sequence(*normalizers: object) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(normalizers)}


def added(content: str, **flags: bool) -> dict[str, Any]:
    token = {"id": 1000, "content": content, "single_word": False, "lstrip": False, "rstrip": False}
    return {**token, "normalized": False, "special": True, **flags}


def document(entries: list[str] | None = None, model: dict[str, Any] | None = None, **parts: Any) -> dict[str, Any]:
    """A tokenizer.json of BPE without merges, whose entries are single characters that a text can reach."""
    vocabulary = {entry: index for index, entry in enumerate(LETTERS if entries is None else entries)}
    bpe = {"type": "BPE", "unk_token": "<unk>", "fuse_unk": False, "vocab": vocabulary, "merges": [["a", "a"]]}
    empty: dict[str, Any] = {"version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": None}
    return {**empty, "post_processor": None, "decoder": None, **parts, "model": {**bpe, **(model or {})}}


BOUNDED = {
    "one unknown token per character": document(),
    "byte fallback": document([*LETTERS, *BYTES], {"byte_fallback": True, "fuse_unk": True}),
    "byte level": document(["aa", *byte_alphabet()], {"unk_token": None}, pre_tokenizer=BYTE_LEVEL),
    "sentencepiece": document(normalizer=sequence(PREPEND, SPACES)),
    "composed": document(normalizer=NFC),
    "shortened": document(normalizer={"type": "Replace", "pattern": {"String": "bbb"}, "content": "a"}),
    "added token": document(added_tokens=[added("a" * 50)]),
    "normalized added token": document(normalizer=NFC, added_tokens=[added("a" * 50, normalized=True)]),
}
UNBOUNDED = {
    "stripped": document(normalizer=STRIP),
    "collapsed white space": document(normalizer=sequence(NFC, COLLAPSE)),
    "removed": document(normalizer={"type": "Replace", "pattern": {"String": "b"}, "content": ""}),
    "unknown normalizer": document(normalizer={"type": "Precompiled", "precompiled_charsmap": ""}),
    "white space is dropped": document(pre_tokenizer={"type": "WhitespaceSplit"}),
    "removed by a split": document(
        pre_tokenizer={"type": "Split", "pattern": {"String": "b"}, "behavior": "Removed", "invert": False}
    ),
    "fused unknown token": document(model={"fuse_unk": True}),
    "unknown characters give no token": document(model={"unk_token": None}),
    "some bytes are missing": document([*LETTERS, *BYTES[1:]], {"byte_fallback": True, "fuse_unk": True}),
    "absorbs white space": document(added_tokens=[added("<s>", rstrip=True)]),
    "whole words": document(model={"type": "WordLevel"}),
}


@pytest.mark.parametrize("name", BOUNDED)
@given(text=st.text(alphabet="ab é\u0301\u1f82▁漢", max_size=60))
@settings(max_examples=60, deadline=None)
def test_no_token_stands_for_more_characters_than_the_bound(name: str, text: str) -> None:
    bound = max_chars_per_token(BOUNDED[name])
    assert bound is not None
    encoding = tokenizers.Tokenizer.from_str(json.dumps(BOUNDED[name])).encode(text, add_special_tokens=False)
    assert len(text) <= bound * len(encoding.ids)


@pytest.mark.parametrize(
    ("name", "text"),
    [("composed", "\u03b1\u0313\u0300\u0345" * 9), ("shortened", "bbb" * 9), ("added token", "a" * 50 * 9)],
)
def test_the_bound_is_reached_or_nearly_so(name: str, text: str) -> None:
    bound = max_chars_per_token(BOUNDED[name])
    assert bound is not None
    encoding = tokenizers.Tokenizer.from_str(json.dumps(BOUNDED[name])).encode(text, add_special_tokens=False)
    assert bound * len(encoding.ids) < len(text) * 10


@each_case("name", UNBOUNDED)
def test_there_is_not_always_a_bound(name: str) -> None:
    assert max_chars_per_token(UNBOUNDED[name]) is None


def read(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    return content


def test_bounds_of_real_tokenizers() -> None:
    demo = read(DEMO_MODEL)
    assert max_chars_per_token(demo) == max(map(len, demo["model"]["vocab"]))
    stories = read(shared_data("models/stories260K"))
    assert max_chars_per_token(stories) == max(map(len, stories["model"]["vocab"]))
    assert max_chars_per_token(read(shared_data("models/babyllama-105"))) is None


@each_case(
    ("normalizer", "text"),
    [
        (None, "abc"),
        (NFC, "\U0001d160"),
        ({"type": "NFKD"}, "\ufdfa"),
        ({"type": "Lowercase"}, "\u0130"),
        ({"type": "ByteLevel"}, "😀"),
        (sequence(PREPEND, SPACES), "a"),
        ({"type": "Replace", "pattern": {"String": "a"}, "content": "bb"}, "aaa"),
        ({"type": "Replace", "pattern": {"String": ""}, "content": "yy"}, "a"),
        ({"type": "Replace", "pattern": {"Regex": "x*"}, "content": "yy"}, "a"),
        ({"type": "Replace", "pattern": {"Regex": "x*"}, "content": "yy"}, "abab"),
    ],
    ids=str,
)
def test_a_normalizer_grows_a_text_by_at_most_its_bound(normalizer: dict[str, Any] | None, text: str) -> None:
    backend = tokenizers.Tokenizer.from_str(json.dumps(document(normalizer=normalizer))).normalizer
    grown = backend.normalize_str(text) if backend else text
    assert len(text) <= len(grown) <= max_growth(normalizer) * len(text)


def test_the_growth_of_a_chain_is_multiplied() -> None:
    doubling = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    assert max_growth(sequence(*[doubling] * 30)) == 2**30
