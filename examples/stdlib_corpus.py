"""The corpus of the demo model: the sources of the running Python's standard library, split by module.

A module is held out when the SHA-256 of its path, relative to the library, is divisible by 33: about 3 %, the same
modules on every machine. Each Python version has other sources, and so another corpus.
"""

import hashlib
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0
VOCAB_SIZE = 4096
_HELD_OUT_ONE_IN = 33
_LARGEST_BYTES = 400_000
_LARGEST_TABLE_BYTES = 120_000
_LEFT_OUT = {"site-packages", "lib2to3", "idlelib"}  # not the library, or mostly grammar and user interface tables
_TABLES = {"encodings", "test"}  # folders whose largest files are tables of data


@dataclass(frozen=True)
class Module:
    """A module of the library: its path within it, in POSIX form, and its source."""

    name: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """The modules to train on and those held out, each sorted by name."""

    train: tuple[Module, ...]
    heldout: tuple[Module, ...]

    @property
    def heldout_text(self) -> str:
        """The held-out modules as one text, a line break between any two."""
        return "\n".join(module.text for module in self.heldout)


def read_corpus(library: Path | None = None) -> Corpus:
    """Read the standard library (default: that of the running Python) and split it."""
    root = library or Path(sysconfig.get_paths()["stdlib"])
    modules = list(_modules(root))
    return Corpus(
        train=tuple(module for module in modules if not is_held_out(module.name)),
        heldout=tuple(module for module in modules if is_held_out(module.name)),
    )


def is_held_out(name: str) -> bool:
    """Whether the module at this path is never trained on."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % _HELD_OUT_ONE_IN == 0


def train_tokenizer(corpus: Corpus, vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """A byte-level BPE of the training modules; token 0 ends a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((module.text for module in corpus.train), trainer)
    return tokenizer


def encode_modules(tokenizer: Tokenizer, modules: Sequence[Module], seed: int) -> NDArray[np.int64]:
    """All modules as one row of tokens, in an order drawn from the seed, each followed by the end of text."""
    order = np.random.default_rng(seed).permutation(len(modules))
    texts = [modules[index].text for index in order]
    pieces = [[*encoding.ids, END_OF_TEXT_ID] for encoding in tokenizer.encode_batch(texts)]
    return np.concatenate([np.array(piece, dtype=np.int64) for piece in pieces])


def _modules(root: Path) -> Iterable[Module]:
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if _is_left_out(relative, path.stat().st_size):
            continue
        try:
            yield Module(relative.as_posix(), path.read_text("utf-8"))
        except UnicodeDecodeError:
            continue  # a few tests of the library are in other encodings on purpose


def _is_left_out(relative: Path, size: int) -> bool:
    parts = set(relative.parts)
    is_table = bool(parts & _TABLES) and size > _LARGEST_TABLE_BYTES
    return bool(parts & _LEFT_OUT) or size >= _LARGEST_BYTES or is_table
