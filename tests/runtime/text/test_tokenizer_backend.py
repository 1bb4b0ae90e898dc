"""Damaged and hostile tokenizer.json files: each is refused when it is loaded, with one error that names the part.

The cases are the classes of failures of the tokenizers package that random changes to real files have shown: panics
while loading and while encoding, aborts, endless loops, and errors at the first text that has an unknown character.
"""

import ctypes
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from ingot.errors import ArtifactError, RequestError
from ingot.runtime.text.tokenizer import Tokenizer
from ingot.runtime.text.tokenizer_backend import SAMPLES, library_errors, read_tokenizer, steps
from tests.data_paths import DEMO_MODEL, shared_data
from tests.each_case import each_case
from tests.runtime.text.test_precompiled_map import LETTER, encoded

DOUBLING = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
TEXT = {"Sequence": {"id": "A", "type_id": 0}}


def bpe(**entries: Any) -> dict[str, Any]:
    return {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]], **entries}


def added(content: str, **flags: Any) -> dict[str, Any]:
    token = {"id": 9000, "content": content, "single_word": False, "lstrip": False, "rstrip": False}
    return {**token, "normalized": False, "special": True, **flags}


def template(*single: object, **special: object) -> dict[str, Any]:
    return {"type": "TemplateProcessing", "single": list(single), "pair": [TEXT], "special_tokens": special}


def special(name: str) -> dict[str, Any]:
    return {"SpecialToken": {"id": name, "type_id": 0}}


def sequence(*normalizers: object) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(normalizers)}


STRIP = {"type": "Strip", "strip_left": True, "strip_right": True}
DAMAGED: dict[str, tuple[dict[str, Any], str]] = {
    "a map that is not one": (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}},
        "the normalizer Precompiled has a damaged precompiled_charsmap: its trie",
    ),
    "a map that leaves its trie": (
        {"normalizer": sequence({"type": "NFC"}, {"type": "Precompiled", "precompiled_charsmap": "BAAAAP////9hAGIA"})},
        "precompiled_charsmap: an offset of its trie leaves the trie",
    ),
    "a chain that doubles": (
        {"normalizer": sequence(*[DOUBLING] * 30)},
        r"the normalizer \(30 Replace\) can make a text 1,073,741,824 times longer; at most 4,096 times",
    ),
    "a chain that doubles without names": (
        {"normalizer": sequence(*[{**DOUBLING, "type": "?"}] * 30)},
        r"the normalizer '\?' is not supported; allowed: BertNormalizer, ByteLevel",
    ),
    "a pre-tokenizer whose type is an object": ({"pre_tokenizer": {"type": {"a": 1}}}, "is not a valid tokenizer"),
    "a normalizer whose type is an object": (
        {"normalizer": {"type": {"String": "a"}}},
        "the normalizer {'String': 'a'}",
    ),
    "a long replacement": (
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "a"}, "content": "x" * 10_000}},
        "can make a text 20,001 times longer",
    ),
    "a chain of long maps": (
        {"normalizer": sequence(*[{"type": "Precompiled", "precompiled_charsmap": encoded(LETTER)}] * 9)},
        r"the normalizer \(9 Precompiled\) can make a text 19,683 times longer",
    ),
    "pieces of no length": (
        {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
        "'FixedLength' has length 0, not at",
    ),
    "a template with an unknown token": (
        {"post_processor": template(special("[CLS]"), TEXT)},
        r"'TemplateProcessing' uses the special token '\[CLS\]', which it does not define",
    ),
    "a template that repeats the text": (
        {"post_processor": template(*[TEXT] * 50)},
        "has 50 parts, 50 of them the text",
    ),
    "a template with a token outside the vocabulary": (
        {"post_processor": template(special("x"), TEXT, x={"id": "x", "ids": [2**32 - 1], "tokens": ["x"]})},
        "the post_processor writes token 4294967295, which the vocabulary does not contain",
    ),
    "a template with a token that is many": (
        {"post_processor": template(special("x"), TEXT, x={"id": "x", "ids": [0] * 99, "tokens": ["x"] * 99})},
        "the post_processor makes 99 tokens of the 0 of ''; it may add 64",
    ),
    "merges without their prefix": (
        {"model": bpe(continuing_subword_prefix="\0")},
        r"the merge \['a', 'b'\] does not continue with the prefix '\\x00'",
    ),
    "an added token that the normalizer removes": (
        {"normalizer": STRIP, "added_tokens": [added(" ", normalized=True)]},
        "the added token ' ' is empty after the normalizer",
    ),
    "words without an unknown token": (
        {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "<unk>"}},
        r"cannot encode the text .*WordLevel error: Missing \[UNK\] token",
    ),
    "pieces without an unknown token": (
        {"model": {"type": "Unigram", "unk_id": None, "vocab": [["a", -1.0]], "byte_fallback": False}},
        "cannot encode the text .*unk_id` is missing",
    ),
    "an unknown token that is missing": ({"model": bpe(unk_token="nope")}, "cannot encode the text .*Unk token `nope`"),
    "no model": ({"model": None}, "it has no model"),
    "a model of another kind": ({"model": {"type": "Best"}}, "is not a valid tokenizer"),
    "a decoder that grows": (
        {"decoder": {"type": "Sequence", "decoders": [DOUBLING] * 30}},
        "a decoder that makes a token 128 times longer is not supported",
    ),
    "a decoder that strips a word": (
        {"decoder": {"type": "Strip", "content": "ab", "start": 1, "stop": 0}},
        "is not a valid tokenizer|must be one character",
    ),
}


def write(folder: Path, entries: dict[str, Any], base: Path = DEMO_MODEL) -> Path:
    document = json.loads((base / "tokenizer.json").read_text(encoding="utf-8"))
    (folder / "tokenizer.json").write_text(json.dumps({**document, **entries}), encoding="utf-8")
    return folder


@each_case("name", DAMAGED)
def test_a_damaged_tokenizer_is_refused_when_it_is_loaded(tmp_path: Path, name: str) -> None:
    entries, message = DAMAGED[name]
    with pytest.raises(ArtifactError, match=message) as caught:
        Tokenizer.load(write(tmp_path, entries))
    assert "tokenizer.json" in str(caught.value)
    assert len(str(caught.value)) < 500


@each_case(
    "content",
    [
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"model": {}, "x": ' + b"9" * 5000 + b"}",
        b'{"model": {"type": "\\ud800"}}',
        b"\0" * 100,
        b'{"model": {"type": "BPE", "vocab": {"\\u0000": 0}, "merges": []}',
        b"null",
        b'{"normalizer": null, "normalizer": {"type": "NFC"}, "model": {}}',
    ],
    ids=lambda value: value[:30].decode(),
)
def test_a_file_that_is_not_json_of_a_tokenizer_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ArtifactError, match=r"tokenizer\.json is not a? ?valid (JSON|tokenizer)"):
        Tokenizer.load(tmp_path)


def test_contents_that_are_odd_but_right_are_read(tmp_path: Path) -> None:
    odd = [added("\0", id=9000), added("x" * 10_000, id=9001), added("  \n", id=9002), added("é\u0301", id=9003)]
    tokenizer = Tokenizer.load(write(tmp_path, {"added_tokens": odd}))
    for token in odd:
        text = f"a{token['content']}b"
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_a_normalizer_that_may_grow_a_text_is_bounded_by_its_length(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write(tmp_path, {"normalizer": sequence(*[DOUBLING] * 12)}))
    assert len(tokenizer.encode("a")) > 100
    with pytest.raises(RequestError, match="the text has 20,000 characters; at most 16,384 are allowed, because"):
        tokenizer.encode("b" * 20_000)


def test_a_panic_on_one_text_is_an_error_of_that_text(tmp_path: Path) -> None:
    split = {"type": "Split", "pattern": {"Regex": "(q+)+$"}, "behavior": "Isolated", "invert": False}
    tokenizer = Tokenizer.load(write(tmp_path, {"pre_tokenizer": split}))
    with pytest.raises(RequestError, match=r"the tokenizer fails on this text .*retry-limit-in-match over"):
        tokenizer.encode("q" * 40 + "b")
    assert tokenizer.encode("q")


def test_an_interrupt_is_not_an_error_of_the_library() -> None:
    with pytest.raises(KeyboardInterrupt), library_errors(ArtifactError):
        raise KeyboardInterrupt
    with pytest.raises(ArtifactError, match="reason"), library_errors(ArtifactError):
        raise Exception("reason")  # as the package does


def test_steps_of_nested_sequences_are_found() -> None:
    assert list(steps(sequence(STRIP, sequence(DOUBLING)), "normalizers")) == [STRIP, DOUBLING]
    assert list(steps(None, "normalizers")) == list(steps(sequence(3), "normalizers")) == []


@pytest.mark.parametrize("model", ["stories260K", "babyllama-105"])
def test_real_tokenizers_encode_the_samples(model: str) -> None:
    tokenizer = Tokenizer.load(shared_data(f"models/{model}"))
    whole = tokenizers.Tokenizer.from_file(str(shared_data(f"models/{model}") / "tokenizer.json"))
    assert [tokenizer.encode(text, add_special_tokens=False) for text in SAMPLES] == [
        whole.encode(text, add_special_tokens=False).ids for text in SAMPLES
    ]


def test_dropout_of_training_does_not_make_the_tokens_random(tmp_path: Path) -> None:
    document = json.loads((DEMO_MODEL / "tokenizer.json").read_text(encoding="utf-8"))
    plain = Tokenizer.load(DEMO_MODEL).encode("def read_file(path):")
    document["model"]["dropout"] = 0.9
    (tmp_path / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")
    tokenizer = Tokenizer.load(tmp_path)
    assert all(tokenizer.encode("def read_file(path):") == plain for _ in range(5))


def test_the_package_keeps_the_tokens_of_few_words() -> None:
    """It keeps 10,000 in each thread by default, 500 bytes and more of each."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        pytest.skip("the C library does not tell how much memory is in use")
    libc.mallinfo2.restype = _MallInfo
    backend, _ = read_tokenizer(DEMO_MODEL / "tokenizer.json")
    words = [f"{number:017d}" for number in range(20_000)]
    backend.encode(" ".join(words[:100]))
    before = libc.mallinfo2().uordblks
    for start in range(100, len(words), 100):
        backend.encode(" ".join(words[start : start + 100]))
    assert libc.mallinfo2().uordblks - before < 2_500_000


_MALL_INFO = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class _MallInfo(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in _MALL_INFO.split())
