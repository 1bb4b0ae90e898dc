"""Tokenizer metadata of GGUF from a tokenizer.json."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ingot.errors import UsageError
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.checkpoint.config.decoder import read_config
from ingot.pipeline.checkpoint.gguf import END_TOKENS
from ingot.pipeline.interchange.transcode import transcode
from ingot.pipeline.interchange.writers.gguf_tokenizer import tokenizer_metadata
from ingot.runtime.text.tokenizer import Tokenizer
from tests.data_paths import DEMO_MODEL, FIXTURES
from tests.each_case import each_case
from tests.pipeline.tiny_checkpoint import edit_json

TOKENIZER = json.loads((DEMO_MODEL / "tokenizer.json").read_text(encoding="utf-8"))


def metadata_of(folder: Path) -> dict[str, Any]:
    checkpoint = Checkpoint.open(folder)
    return tokenizer_metadata(checkpoint, read_config(checkpoint))


def with_tokenizer(folder: Path, **changes: Any) -> Path:
    """Copy the demo model, with changes to its tokenizer.json."""
    shutil.copytree(DEMO_MODEL, folder)
    (folder / "tokenizer.json").write_text(json.dumps({**TOKENIZER, **changes}), encoding="utf-8")
    return folder


def test_tokens_are_in_the_order_of_their_ids_with_types_and_merges() -> None:
    found = metadata_of(DEMO_MODEL)
    vocabulary = TOKENIZER["model"]["vocab"]
    assert all(found["tokenizer.ggml.tokens"][index] == token for token, index in vocabulary.items())
    special = {entry["id"] for entry in TOKENIZER["added_tokens"] if entry["special"]}
    types = found["tokenizer.ggml.token_type"]
    assert {index for index, kind in enumerate(types) if kind == 3} == special
    assert (found["tokenizer.ggml.model"], found["tokenizer.ggml.pre"]) == ("gpt2", "gpt-2")
    assert all(merge.count(" ") == 1 for merge in found["tokenizer.ggml.merges"])


@pytest.mark.parametrize(
    "changes",
    [
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": {"type": "ByteLevel", "use_regex": True, "add_prefix_space": True}},
        {"normalizer": {"type": "Lowercase"}},
    ],
)
def test_a_tokenizer_that_splits_otherwise_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"tokenizer\.json: gguf is written with byte-level BPE .* splits differently"):
        metadata_of(with_tokenizer(tmp_path / "model", **changes))


def post_processor(*before: str, after: tuple[str, ...] = ()) -> dict[str, Any]:
    """One that adds these tokens to a text."""
    vocabulary = TOKENIZER["model"]["vocab"]
    piece = [{"SpecialToken": {"id": token, "type_id": 0}} for token in (*before, *after)]
    single = [*piece[: len(before)], {"Sequence": {"id": "A", "type_id": 0}}, *piece[len(before) :]]
    special = {token: {"id": token, "ids": [vocabulary[token]], "tokens": [token]} for token in (*before, *after)}
    return {"type": "TemplateProcessing", "single": single, "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": special}  # fmt: skip


@each_case(("before", "after"), [((), ()), (("<|endoftext|>",), ()), (("<|endoftext|>",), ("!",)), ((), ("!",))])
def test_the_post_processor_says_which_tokens_are_added(
    before: tuple[str, ...], after: tuple[str, ...], tmp_path: Path
) -> None:
    found = metadata_of(with_tokenizer(tmp_path / "model", post_processor=post_processor(*before, after=after)))
    added = found["tokenizer.ggml.add_bos_token"], found["tokenizer.ggml.add_eos_token"]
    assert added == (bool(before), bool(after))
    assert found["tokenizer.ggml.bos_token_id"] == 0
    assert found["tokenizer.ggml.eos_token_id"] == (1 if after else 0)


def test_a_post_processor_that_adds_two_tokens_is_refused(tmp_path: Path) -> None:
    folder = with_tokenizer(tmp_path / "model", post_processor=post_processor("<|endoftext|>", "!"))
    with pytest.raises(UsageError, match=r"adds \[0, 1\] before a text and \[\] after it, and gguf one token at each"):
        metadata_of(folder)


def test_every_end_token_is_written_and_read_back(tmp_path: Path) -> None:
    folder = with_tokenizer(tmp_path / "model")
    edit_json(folder / "generation_config.json", {"eos_token_id": [5, 0, 7]})
    found = metadata_of(folder)
    assert [found[key] for key in END_TOKENS] == [0, 5, 7], "the tokenizer's own is the first"
    transcode(folder, tmp_path / "out", "gguf")
    (tmp_path / "out" / "generation_config.json").unlink()
    assert read_config(Checkpoint.open(tmp_path / "out" / "out.gguf")).eos_token_ids == (0, 5, 7)
    edit_json(folder / "generation_config.json", {"eos_token_id": [5, 0, 7, 9]})
    with pytest.raises(UsageError, match=r"has the end tokens \[0, 5, 7, 9\], and gguf holds 3; remove some"):
        metadata_of(folder)


def test_chat_templates_are_written_by_name(tmp_path: Path) -> None:
    folder = with_tokenizer(tmp_path / "model")
    (folder / "chat_template.jinja").unlink()  # it counts before those of the configuration
    templates = [{"name": "default", "template": "{{ 1 }}"}, {"name": "tool_use", "template": "{{ 2 }}"}]
    edit_json(folder / "tokenizer_config.json", {"chat_template": templates})
    found = metadata_of(folder)
    assert found["tokenizer.chat_template"] == "{{ 1 }}"
    assert found["tokenizer.chat_templates"] == ["tool_use"]
    assert found["tokenizer.chat_template.tool_use"] == "{{ 2 }}"


def test_llama_cpp_reads_the_same_tokens_template_and_ends(tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    folder = with_tokenizer(tmp_path / "model", post_processor=post_processor("<|endoftext|>", after=("!",)))
    edit_json(folder / "generation_config.json", {"eos_token_id": [0, 5]})
    (folder / "chat_template.jinja").unlink()  # it counts before that of the configuration
    edit_json(folder / "tokenizer_config.json", {"chat_template": "{{ messages }}"})
    transcode(folder, tmp_path / "out", "gguf")
    theirs = llama_cpp.Llama(str(tmp_path / "out" / "out.gguf"), n_ctx=64, verbose=False)
    ours = Tokenizer.load(folder)
    for text in ("x = 1", "def f(x):\n\treturn x  # é 漢字 😀", "  two  spaces", ""):
        assert theirs.tokenize(text.encode(), add_bos=True, special=True) == ours.encode(text), text
    assert theirs.metadata["tokenizer.chat_template"] == "{{ messages }}"
    vocabulary = llama_cpp.llama_model_get_vocab(theirs.model)
    ends = [token for token in range(ours.vocab_size) if llama_cpp.llama_vocab_is_eog(vocabulary, token)]
    assert set(ends) == {0, 1, 5}


def test_a_checkpoint_without_a_tokenizer_has_no_metadata() -> None:
    assert metadata_of(FIXTURES / "checkpoints" / "llama") == {}
