"""Compares the calibration text with the evaluation text: a model must not be measured on what it was fitted to.

The same text is refused whatever its form: digests leave white space and line ends out, and read the texts of JSONL
records. For other pairs, the share of the evaluated tokens that are in a run of WINDOW tokens which the calibration
text has too is recorded with the calibration facts; it is warned of, and refused above a half.
"""

import hashlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ingot.errors import DataError
from ingot.pipeline.calibrate.documents import Corpus, Document, is_jsonl, read_corpus
from ingot.runtime import Tokenizer

WINDOW = (
    32  # tokens that two texts have in common by chance only where they quote, or repeat a phrase such as a licence
)
_REFUSED_SHARE = 0.5
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # odd, so that no power of it is 0
_BATCH = 1 << 22
_BYTE_ORDER_MARK = "\ufeff"
_ADVICE = (
    "the model would be measured on text that it was fitted to, and no gate would mean anything. Give another text as "
    "calibration.text or evaluation.text"
)

_log = logging.getLogger("ingot.pipeline")
Tokens = NDArray[np.int64]
Hashes = NDArray[np.uint64]


@dataclass(frozen=True)
class HeldOutText:
    """The evaluation text: its file, and how many of its tokens are evaluated."""

    file: Path
    tokens: int

    def evaluated(self, tokenizer: Tokenizer) -> Tokens:
        """The tokens that are read by the evaluation."""
        text = self.file.read_text(encoding="utf-8", errors="replace")
        return np.asarray(tokenizer.encode(text, add_special_tokens=False)[: self.tokens + 1], np.int64)


def refuse_same_text(corpus: Corpus, held_out: HeldOutText) -> None:
    """Raise DataError when the corpus, or one document of it, is the evaluation text in whatever form."""
    forms = set(_forms(held_out.file))
    same = next((place for place, digest in _digests(corpus) if digest in forms), None)
    if same is not None:
        raise DataError(
            f"the calibration text {same} and the evaluation text {held_out.file.name} are the same text: {_ADVICE}"
        )


def checked_share(name: str, documents: Sequence[Tokens], held_out: Tokens) -> float:
    """Return the share of the evaluated tokens that the calibration text has too; warn of it.

    DataError when it is above a half.
    """
    share = shared_share(held_out, documents)
    if not share:
        return share
    found = (
        f"{share:.2%} of the evaluated tokens are in runs of {WINDOW} or more that the calibration text {name} has too"
    )
    if share > _REFUSED_SHARE:
        raise DataError(f"{found}: {_ADVICE}")
    _log.warning("%s: remove them from one of the texts, or the accuracy is measured too high", found)
    return share


def shared_share(text: Tokens, others: Sequence[Tokens]) -> float:
    """Share of the tokens of `text` that are in a run of WINDOW tokens which one of the others has too."""
    wanted = _hashes(text)
    if not wanted.size:
        return 0.0
    found = _are_in(wanted, _batches(others))
    edges = np.zeros(len(text) + 1, np.int64)
    starts = np.flatnonzero(found)
    np.add.at(edges, starts, 1)
    np.add.at(edges, starts + WINDOW, -1)
    return float(np.mean(np.cumsum(edges)[:-1] > 0))


def _are_in(wanted: Hashes, batches: Iterable[Hashes]) -> NDArray[np.bool_]:
    """Return for each value whether a batch has it. numpy.isin would sort the batches, which are far larger."""
    ascending = np.sort(wanted)
    # Of equal values only the first is marked.
    found = np.zeros(len(wanted), bool)
    for batch in batches:
        at = np.minimum(np.searchsorted(ascending, batch), len(ascending) - 1)
        found[at[ascending[at] == batch]] = True
    return found[np.searchsorted(ascending, wanted)]


def _batches(texts: Sequence[Tokens]) -> Iterator[Hashes]:
    """Hashes of the texts' runs, some millions at a time."""
    batch, size = list[Hashes](), 0
    for text in texts:
        batch.append(_hashes(text))
        size += batch[-1].size
        if size >= _BATCH:
            yield np.concatenate(batch)
            batch, size = [], 0
    if batch:
        yield np.concatenate(batch)


def _hashes(tokens: Tokens) -> Hashes:
    """A 64-bit hash of every run of WINDOW tokens, a polynomial in _MULTIPLIER; empty for a shorter text."""
    count = len(tokens) - WINDOW + 1
    if count < 1:
        return np.zeros(0, np.uint64)
    mixed = _mixed(tokens.astype(np.uint64))
    hashes = np.zeros(count, np.uint64)
    for at in range(WINDOW):
        hashes *= _MULTIPLIER
        hashes += mixed[at : at + count]
    return hashes


def _mixed(values: Hashes) -> Hashes:
    """SplitMix64's finalizer: it spreads token ids, which are small and close."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9) + _MULTIPLIER
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _forms(file: Path) -> Iterator[str]:
    """Digests of a file as one text, and, for JSONL records, of their texts."""
    yield _digest([file.read_text(encoding="utf-8", errors="replace")])
    if is_jsonl(file):
        try:
            yield _digest(map(_words, read_corpus(file).documents))
        except DataError:  # other records, or none: the evaluation reads the file as text
            return


def _digests(corpus: Corpus) -> Iterator[tuple[str, str]]:
    """Names and digests: of the whole corpus, then of each of its documents."""
    yield corpus.name, _digest(map(_words, corpus.documents))
    if len(corpus.documents) > 1:
        for document in corpus.documents:
            yield document.place, _digest([_words(document)])


def _words(document: Document) -> str:
    if document.text is not None:
        return document.text
    contents = (message.get("content") for message in document.messages or ())
    return "".join(content for content in contents if isinstance(content, str))


def _digest(texts: Iterable[str]) -> str:
    """SHA-256 of the texts without white space and byte order marks, end to end."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update("".join(text.replace(_BYTE_ORDER_MARK, "").split()).encode("utf-8", errors="replace"))
    return digest.hexdigest()
