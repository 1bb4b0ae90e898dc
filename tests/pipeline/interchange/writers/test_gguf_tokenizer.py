"""Tokenizer metadata of GGUF from a tokenizer.json."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ingot.errors import UsageError
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.checkpoint.config.decoder import read_config
from ingot.pipeline.interchange.writers.gguf_tokenizer import tokenizer_metadata
from tests.data_paths import DEMO_MODEL, FIXTURES

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


def test_a_checkpoint_without_a_tokenizer_has_no_metadata() -> None:
    assert metadata_of(FIXTURES / "checkpoints" / "llama") == {}
