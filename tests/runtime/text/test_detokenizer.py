"""Streamed decoding: never half a character, and in the end what decoding at once gives; DecodeStream's faults."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from tokenizers.decoders import DecodeStream

from ingot.errors import ArtifactError
from ingot.runtime.text.detokenizer import Detokenizer, TextDecoder
from ingot.runtime.text.tokenizer import Tokenizer
from tests.data_paths import DEMO_MODEL, shared_data
from tests.each_case import each_case

TEXT = "Once upon a time, Zoë said:  'naïve 😀 漢字' \n\n\tdef f(x): return x  "


def model_folder(name: str) -> Path:
    return DEMO_MODEL if name == "stdlib-llama-6m" else shared_data(f"models/{name}")


@pytest.fixture(scope="module", params=["stdlib-llama-6m", "stories260K", "babyllama-105"])
def folder(request: pytest.FixtureRequest) -> Path:
    return model_folder(request.param)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def decoded_at_once(folder: Path) -> Backend:
    return Backend.from_file(str(folder / "tokenizer.json"))


def stream(detokenizer: Detokenizer, token_ids: list[int]) -> list[str]:
    return [*map(detokenizer.push, token_ids), detokenizer.flush()]


@settings(deadline=None)
@given(st.text())
def test_the_stream_of_any_text_equals_what_the_tokenizers_package_decodes(
    tokenizer: Tokenizer, decoded_at_once: Backend, text: str
) -> None:
    token_ids = decoded_at_once.encode(text).ids
    parts = stream(tokenizer.detokenizer(), token_ids)
    assert "".join(parts) == decoded_at_once.decode(token_ids) == tokenizer.decode(token_ids)


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**16), max_size=30))
def test_any_tokens_stream_to_what_they_decode_to_at_once(
    tokenizer: Tokenizer, decoded_at_once: Backend, numbers: list[int]
) -> None:
    """Random bytes too. Only runs of byte tokens that are not UTF-8 may differ from the package, by keeping more."""
    token_ids = [number % (tokenizer.vocab_size + 3) for number in numbers]
    text = "".join(stream(tokenizer.detokenizer(), token_ids))
    assert text == tokenizer.decode(token_ids)
    expected = decoded_at_once.decode(token_ids)
    if not tokenizer.text_decoder.byte_fallback or "\ufffd" not in expected:
        assert text == expected
    assert len(text) <= len(expected)


@settings(deadline=None)
@given(st.text(max_size=20), st.text(max_size=20))
def test_after_a_prompt_the_stream_continues_where_the_prompt_ends(
    tokenizer: Tokenizer, decoded_at_once: Backend, prompt: str, answer: str
) -> None:
    before = decoded_at_once.encode(prompt).ids
    after = decoded_at_once.encode(answer, add_special_tokens=False).ids
    continued = "".join(stream(tokenizer.detokenizer(before), after))
    assert tokenizer.decode(before) + continued == decoded_at_once.decode(before + after)


def test_the_prompts_last_space_is_not_lost() -> None:
    tokenizer = Tokenizer.load(model_folder("stories260K"))
    once, upon = tokenizer.encode("Once"), tokenizer.encode("upon", add_special_tokens=False)
    assert "".join(stream(tokenizer.detokenizer(once), upon)) == " upon"
    assert tokenizer.decode(upon) == "upon"


def test_no_piece_of_a_stream_contains_half_a_character(tokenizer: Tokenizer) -> None:
    parts = stream(tokenizer.detokenizer(), tokenizer.encode(TEXT, add_special_tokens=False))
    assert not any("\ufffd" in part for part in parts)


def test_a_character_appears_with_its_last_byte() -> None:
    tokenizer = Tokenizer.load(model_folder("stories260K"))
    bytes_of = {byte: index for index in range(512) if (byte := tokenizer.token(index)) is not None}
    token_ids = [bytes_of[f"<0x{byte:02X}>"] for byte in "€\n".encode()]
    assert stream(tokenizer.detokenizer([bytes_of["▁a"]]), token_ids) == ["", "", "€", "\n", ""]


def test_a_character_that_is_never_completed_becomes_one_replacement() -> None:
    decoder = Detokenizer(TextDecoder(byte_level=True), ["Ã", "a", "â", "Ĥ"].__getitem__)
    assert stream(decoder, [0, 1, 2, 3]) == ["", "\ufffda", "", "", "\ufffd"]


def test_byte_fallback_keeps_the_good_characters_around_a_wrong_byte() -> None:
    decoder = Detokenizer(TextDecoder(byte_fallback=True), ["<0xC3>", "<0xA9>", "<0xFF>", "x"].__getitem__)
    assert stream(decoder, [0, 1, 2, 0, 3]) == ["", "é", "\ufffd", "", "\ufffdx", ""]


def test_unknown_tokens_and_skipped_special_tokens_give_no_text() -> None:
    tokenizer = Tokenizer.load(DEMO_MODEL)
    assert tokenizer.decode([0, 10**6]) == ""
    assert tokenizer.decode([0], skip_special_tokens=False) == "<|endoftext|>"


def test_each_token_is_decoded_once() -> None:
    decoded: list[int] = []

    def token(token_id: int) -> str:
        decoded.append(token_id)
        return "aÃ"[token_id]

    detokenizer = Detokenizer(TextDecoder(byte_level=True), token)
    token_ids = [0, 1, 1, 1] * 50
    for token_id in token_ids:
        detokenizer.push(token_id)
    assert decoded == token_ids


BYTES = ["<0xC3>", "<0xA9>", "<0xFF>", "x"]


def backend_of(vocabulary: list[str], decoder: Any) -> Backend:
    backend = Backend(models.WordLevel({token: index for index, token in enumerate(vocabulary)}, vocabulary[-1]))
    if decoder is not None:
        backend.decoder = decoder
    return backend


def test_decode_stream_raises_where_a_wrong_byte_follows_a_character_spelled_in_bytes() -> None:
    """Our reason for a detokenizer of our own: any model may generate these tokens."""
    assert stream(Detokenizer(TextDecoder(byte_fallback=True), BYTES.__getitem__), [0, 1, 2, 3]) == [
        *("", "é", "\ufffd", "x", "")
    ]
    backend, library = backend_of(BYTES, decoders.ByteFallback()), DecodeStream()
    assert [library.step(backend, token_id) for token_id in [0, 1]] == [None, "é"]
    with pytest.raises(Exception, match="Invalid prefix encountered"):
        for token_id in [2, 3]:
            library.step(backend, token_id)


def test_decode_stream_loses_an_incomplete_character_at_the_end() -> None:
    vocabulary = ["a", "Ã"]
    assert stream(Detokenizer(TextDecoder(byte_level=True), vocabulary.__getitem__), [0, 1]) == ["a", "", "\ufffd"]
    backend, library = backend_of(vocabulary, decoders.ByteLevel()), DecodeStream()
    assert [library.step(backend, token_id) for token_id in [0, 1]] == ["a", None]
    assert not hasattr(library, "flush")
    assert backend.decode([0, 1]) == "a\ufffd"


VOCABULARY = ["▁Hello", "▁", "world", "<0xE2>", "<0x82>", "<0xAC>", "Ġa", "▁▁b", "é", " ", "  c"]
REPLACE = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
GEMMA: dict[str, Any] = {"type": "Sequence", "decoders": [REPLACE, {"type": "ByteFallback"}, {"type": "Fuse"}]}
LLAMA: dict[str, Any] = {"type": "Sequence", "decoders": [*GEMMA["decoders"], STRIP]}
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
REFERENCES = [
    (None, None),
    ({"type": "ByteLevel"}, decoders.ByteLevel()),
    (
        GEMMA,
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
    ),
    (
        LLAMA,
        decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        ),
    ),
    (METASPACE, decoders.Metaspace()),
    ({**METASPACE, "prepend_scheme": "never"}, decoders.Metaspace(prepend_scheme="never")),
]


@each_case(("spec", "package"), REFERENCES, ids=lambda value: str(value)[:40])
@each_case("token_ids", [[0, 1, 2], [1, 0], [7, 2, 6], [3, 4, 5, 0], [10, 2], [9, 9, 2], []])
def test_a_known_decoder_equals_the_package(spec: object, package: Any, token_ids: list[int]) -> None:
    backend = backend_of(VOCABULARY, package)
    detokenizer = Detokenizer(TextDecoder.parse(spec, "tokenizer.json"), VOCABULARY.__getitem__)
    assert "".join(map(detokenizer.push, token_ids)) + detokenizer.flush() == backend.decode(token_ids)


@each_case(
    ("spec", "message"),
    [
        ({"type": "WordPiece"}, "decoder 'WordPiece' is not supported; allowed: ByteFallback, ByteLevel, Fuse"),
        ({"type": "Replace", "pattern": {"Regex": "x"}, "content": ""}, "Replace with pattern"),
        ({"type": "Strip", "content": " ", "start": 0, "stop": 1}, "Strip that cuts the end"),
        ({"type": "Sequence", "decoders": [REPLACE, {"type": "ByteLevel"}]}, "ByteLevel after other steps"),
        ({"type": "Sequence"}, "has no 'decoders'; the file is damaged"),
        ("ByteLevel", "has no 'type'"),
    ],
    ids=str,
)
def test_an_unknown_decoder_is_refused_by_name(spec: object, message: str) -> None:
    with pytest.raises(ArtifactError, match=f"tokenizer.json: .*{message}"):
        TextDecoder.parse(spec, "tokenizer.json")
