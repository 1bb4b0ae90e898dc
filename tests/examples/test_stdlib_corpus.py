"""The demo model's corpus: its split, its tokenizer, and that the committed held-out text is that split's."""

import json
from pathlib import Path

import numpy as np
from examples.stdlib_corpus import END_OF_TEXT_ID, Module, encode_modules, is_held_out, read_corpus, train_tokenizer

from tests.data_paths import DEMO_MODEL


def library(folder: Path) -> Path:
    """A library of a held-out module, a trained one, and files that are left out."""
    for name, text in {
        "copy.py": "import copy\n",
        "abc.py": "import abc\n",
        "site-packages/other.py": "other\n",
        "encodings/table.py": "x" * 120_001,
        "large.py": "x" * 400_000,
    }.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, "utf-8")
    (folder / "latin.py").write_bytes("é".encode("latin-1"))
    return folder


def test_modules_are_split_by_their_names_and_tables_are_left_out(tmp_path: Path) -> None:
    corpus = read_corpus(library(tmp_path))
    assert corpus.train == (Module("abc.py", "import abc\n"),)
    assert corpus.heldout == (Module("copy.py", "import copy\n"),)
    assert corpus.heldout_text == "import copy\n"


def test_the_committed_names_are_those_that_the_split_holds_out() -> None:
    names = json.loads((DEMO_MODEL / "heldout-modules.json").read_text("utf-8"))
    assert all(is_held_out(name) for name in names)


def test_every_module_ends_with_the_end_of_text_in_an_order_of_the_seed(tmp_path: Path) -> None:
    corpus = read_corpus(library(tmp_path))
    tokenizer = train_tokenizer(corpus, vocab_size=260)
    modules = [Module("a.py", "import abc\n"), Module("b.py", "abc\n"), Module("c.py", "import\n")]
    tokens = encode_modules(tokenizer, modules, seed=0)
    assert np.count_nonzero(tokens == END_OF_TEXT_ID) == 3
    assert tokens[-1] == END_OF_TEXT_ID
    np.testing.assert_array_equal(tokens, encode_modules(tokenizer, modules, seed=0))
    ends = np.flatnonzero(tokens == END_OF_TEXT_ID) + 1
    pieces = {tokenizer.decode(piece.tolist()) for piece in np.split(tokens, ends)}
    assert pieces == {"import abc\n", "abc\n", "import\n", ""}
