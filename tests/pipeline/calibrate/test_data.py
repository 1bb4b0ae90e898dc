"""Calibration data: every kind of text, both packings, and a clear error for each unusable text."""

import logging
import shutil
from pathlib import Path

import numpy as np
import pytest

from ingot.errors import DataError
from ingot.pipeline.calibrate import read_calibration_data
from ingot.runtime import Tokenizer
from tests.data_paths import DEMO_MODEL, shared_data
from tests.pipeline.calibrate.calibration_texts import WORDS, read, write

TEXT = DEMO_MODEL / "heldout.txt"
END = 0  # <|endoftext|> of the demo model
TEMPLATE = "{% for m in messages %}<|endoftext|>{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.fixture
def chat_tokenizer(tmp_path: Path) -> Path:
    """The demo model's tokenizer with a chat template."""
    folder = tmp_path / "chat"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(DEMO_MODEL / name, folder / name)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def test_sequences_are_chosen_by_the_seed_without_overlap() -> None:
    first, again = (read(TEXT, 50, 64, seed=1) for _ in range(2))
    other = read(TEXT, 50, 64, seed=2)
    np.testing.assert_array_equal(first.sequences, again.sequences)
    assert first.digest() == again.digest() != other.digest()
    assert len(np.unique(first.sequences, axis=0)) == 50
    assert first.facts.tokens == first.tokens == 3200


def test_packed_documents_are_separated_by_the_eos_token(tmp_path: Path) -> None:
    text = write(tmp_path / "t.jsonl", {"text": WORDS, "id": 1}, "", {"text": WORDS}, {"text": " "})
    encode = Tokenizer.load(DEMO_MODEL).encode
    once = encode(WORDS)
    data = read(text, 1, 2 * len(once) + 1)
    assert data.sequences[0].tolist() == [*once, END, *once]
    assert (data.facts.kind, data.facts.packing, data.facts.documents) == ("jsonl", "packed", 2)
    assert data.facts.text_tokens == 2 * len(once)


def test_a_sequence_begins_with_the_bos_token_if_the_tokenizer_adds_one(tmp_path: Path) -> None:
    stories = shared_data("models/stories260K")
    tokenizer = Tokenizer.load(stories)
    story = tokenizer.encode("Once upon a time", add_special_tokens=False)
    text = write(tmp_path / "t.jsonl", *[{"text": "Once upon a time"}] * 3)
    start, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    packed = read_calibration_data(text, stories, 1, 2 * len(story) + 3, 0, 512)
    assert packed.sequences[0].tolist() == [start, *story, end, start, *story]
    by_document = read_calibration_data(text, stories, 3, 64, 0, 512, packing="documents")
    assert by_document.sequences.tolist() == [[start, *story]] * 3


def test_documents_become_sequences_sorted_by_length_and_truncated(tmp_path: Path) -> None:
    text = write(tmp_path / "t.jsonl", {"text": WORDS * 9}, {"text": "import os"}, {"text": WORDS})
    data = read(text, 3, 64, packing="documents")
    assert data.lengths is not None
    encode = Tokenizer.load(DEMO_MODEL).encode
    short, middle = encode("import os"), encode(WORDS)
    assert data.lengths.tolist() == [len(short), len(middle), 64]
    assert data.sequences[0, : len(short)].tolist() == short
    assert data.facts.tokens == data.tokens == len(short) + len(middle) + 64
    assert data.facts.packing == "documents"


def test_the_field_option_names_a_text_or_messages(tmp_path: Path, chat_tokenizer: Path) -> None:
    text = write(tmp_path / "t.jsonl", {"body": WORDS, "text": "no"})
    assert read(text, 1, field="body").facts.text_tokens == len(Tokenizer.load(DEMO_MODEL).encode(WORDS))
    chat = write(tmp_path / "c.jsonl", {"turns": [{"role": "user", "content": WORDS}]})
    rendered = read(chat, 1, field="turns", chat_template=True, tokenizer=chat_tokenizer, packing="documents")
    assert rendered.sequences[0, 0] == END


def test_conversations_are_rendered_by_the_chat_template_without_additions(
    tmp_path: Path, chat_tokenizer: Path
) -> None:
    turns = [{"role": "user", "content": "import"}, {"role": "assistant", "content": "os"}]
    pair = {"prompt": "import", "completion": "os"}
    text = write(tmp_path / "t.jsonl", {"messages": turns}, pair)
    data = read(text, 2, 64, packing="documents", chat_template=True, tokenizer=chat_tokenizer)
    encode = Tokenizer.load(DEMO_MODEL).encode
    once = encode("<|endoftext|>user: import\n<|endoftext|>assistant: os\n")
    assert [row[: len(once)].tolist() for row in data.sequences] == [once, once]
    packed = read(text, 1, 2 * len(once), chat_template=True, tokenizer=chat_tokenizer)
    assert packed.sequences[0].tolist() == once + once


def test_a_prompt_and_its_completion_form_one_text_without_a_template(tmp_path: Path) -> None:
    text = write(tmp_path / "t.jsonl", {"prompt": "import ", "completion": "os"})
    assert read(text, 1, packing="documents").sequences[0].tolist() == Tokenizer.load(DEMO_MODEL).encode("import os")


def test_a_text_that_is_too_short_is_refused_with_the_counts(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("import os\n" * 100)
    with pytest.raises(DataError, match=r"short.txt: the text has \d+ tokens, 4 sequences of 64; .* needs 16"):
        read(tmp_path / "short.txt", 16, 64)
    with pytest.raises(DataError, match=r"300 tokens, 1 documents; calibration needs 16. .* set .*sequences to 1"):
        read(tmp_path / "short.txt", 16, 64, packing="documents")


def test_a_missing_template_and_a_text_without_messages_are_refused(tmp_path: Path, chat_tokenizer: Path) -> None:
    chat = write(tmp_path / "c.jsonl", {"messages": [{"role": "user", "content": WORDS}]})
    plain = shutil.copytree(DEMO_MODEL, tmp_path / "plain", ignore=shutil.ignore_patterns("*.jinja", "*.safetensors"))
    with pytest.raises(DataError, match=r"c\.jsonl:1: calibration\.chat_template is true: the model has no chat templ"):
        read(chat, 1, chat_template=True, tokenizer=plain)
    with pytest.raises(DataError, match=r"is true, but this is plain text; give JSONL records with messages"):
        read(TEXT, 1, chat_template=True, tokenizer=chat_tokenizer)


@pytest.mark.parametrize("model", ["stories260K", "babyllama-105", "stdlib-llama-6m"])
def test_a_text_in_an_alphabet_that_the_tokenizer_does_not_cover_is_refused(tmp_path: Path, model: str) -> None:
    """Byte fallback, an unknown token, and a byte-level BPE."""
    text = tmp_path / "georgian.txt"
    text.write_text("ყველა ბედნიერი ოჯახი ერთმანეთს ჰგავს, ყველა უბედური ოჯახი თავისებურად უბედურია. " * 9)
    with pytest.raises(DataError, match=r"georgian\.txt: \d\d% of the text's tokens \([\d,]+ of .* refused above 50%"):
        read_calibration_data(text, shared_data(f"models/{model}"), 1, 16, 0, 4096)


def test_a_text_partly_in_another_alphabet_causes_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = tmp_path / "mixed.txt"
    text.write_text((WORDS * 5 + "ყველა ბედნიერი ოჯახი\n") * 5)
    with caplog.at_level(logging.WARNING, "ingot.pipeline"):
        read(text)
    assert "of the text's tokens" in caplog.text
    caplog.clear()
    read(TEXT)
    assert not caplog.text


def test_messages_without_a_chat_template_are_refused_with_their_place(tmp_path: Path) -> None:
    text = write(tmp_path / "a.jsonl", {"messages": [{"role": "user", "content": "a"}]})
    with pytest.raises(DataError, match=r"a\.jsonl:1: the record has messages, wh"):
        read(text, 1)
