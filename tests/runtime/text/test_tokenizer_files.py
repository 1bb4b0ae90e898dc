"""The JSON files of a tokenizer's folder: values that no reader can use are refused with file and key."""

import json
from pathlib import Path

import pytest

from ingot.errors import ArtifactError
from ingot.runtime.text.tokenizer_files import GenerationConfig, TokenizerConfig, read_json
from tests.each_case import each_case


@each_case(
    ("content", "message"),
    [
        ("[" * 100_000, "are nested too deep"),
        ('{"eos_token_id": ' + "9" * 5000 + "}", "is not valid JSON"),
        ('{"eos_token_id": ' + "9" * 50 + "}", "eos_token_id is 9.*; it must be a token id"),
        ('{"eos_token_id": 4294967296}', "eos_token_id is 4294967296; it must be a token id"),
        ('{"eos_token_id": [1, "' + "x" * 5000 + '"]}', "eos_token_id is .*; it must be a token id"),
        ('{"eos_token_id": NaN}', "eos_token_id is nan"),
        ("\0", "is not valid JSON"),
    ],
    ids=lambda value: value[:30],
)
def test_a_wrong_value_has_one_short_message(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "generation_config.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ArtifactError, match=message) as caught:
        GenerationConfig.read(path)
    assert "generation_config.json" in str(caught.value)
    assert len(str(caught.value)) < len(str(path)) + 250


@pytest.mark.parametrize("key", ["bos_token", "chat_template"])
def test_half_a_surrogate_pair_is_refused(tmp_path: Path, key: str) -> None:
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({key: "\ud800"}), encoding="utf-8")
    with pytest.raises(ArtifactError, match=rf"tokenizer_config\.json: {key} is '\\ud800'; it must be a text"):
        TokenizerConfig.read(path)


def test_a_huge_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ingot.runtime.text.tokenizer_files._MAX_BYTES", 10)
    path = tmp_path / "tokenizer.json"
    path.write_text('{"a": "too long"}', encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"tokenizer\.json is larger than 0 MiB; it is not a file of a tokenizer"):
        read_json(path)


def test_a_folder_instead_of_a_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="cannot be read"):
        read_json(tmp_path)
