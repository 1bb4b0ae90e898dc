"""The decoder of tokenizer.json: every known step against the tokenizers package, every unknown one refused."""

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from ingot.errors import ArtifactError
from ingot.runtime.stopping import Detokenizer
from ingot.runtime.text_decoder import TextDecoder

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


@pytest.mark.parametrize(("spec", "package"), REFERENCES, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("token_ids", [[0, 1, 2], [1, 0], [7, 2, 6], [3, 4, 5, 0], [10, 2], [9, 9, 2], []])
def test_a_known_decoder_gives_what_the_package_gives(spec: object, package: Any, token_ids: list[int]) -> None:
    backend = Tokenizer(models.WordLevel({token: index for index, token in enumerate(VOCABULARY)}, "é"))
    if package is not None:
        backend.decoder = package
    detokenizer = Detokenizer(ListSource(TextDecoder.parse(spec, "tokenizer.json")))
    assert "".join(map(detokenizer.push, token_ids)) + detokenizer.flush() == backend.decode(token_ids)


@pytest.mark.parametrize(
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


class ListSource:
    """The vocabulary above."""

    def __init__(self, decoder: TextDecoder) -> None:
        self.text_decoder = decoder

    def token(self, token_id: int, *, skip_special_tokens: bool = True) -> str | None:
        return VOCABULARY[token_id]
