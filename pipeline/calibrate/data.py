"""Calibration data: documents as tokens, made into sequences, of which some are drawn by a seed.

    packed       documents end to end, cut into sequences of exactly `sequence_tokens`; between two documents stand the
                 EOS and BOS tokens where the tokenizer has and wants them
    documents    each document a sequence of its own, cut off at `sequence_tokens`; short ones stay short

Each sequence begins with the BOS token where the tokenizer wants one. A chat template writes all special tokens itself:
none is added to what it renders.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ingot.errors import DataError, RequestError
from ingot.passes.calibration import CalibrationFacts
from ingot.pipeline.calibrate.data_checks import check_alphabet
from ingot.pipeline.calibrate.documents import Corpus, Document, read_corpus
from ingot.runtime import Tokenizer

Packing = Literal["packed", "documents"]
Tokens = NDArray[np.int64]


@dataclass(frozen=True)
class CalibrationData:
    """Token ids and where they come from.

    sequences [sequences, longest]; what stands in a row behind its length is no token of the data
    lengths   [sequences], tokens of each; None where all are as long as the row
    """

    facts: CalibrationFacts
    sequences: Tokens
    lengths: Tokens | None = None

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return self.sequences.size if self.lengths is None else int(self.lengths.sum())

    def digest(self) -> str:
        """SHA-256 over every token and where its sequence ends."""
        lengths = np.full(len(self.sequences), self.sequences.shape[1]) if self.lengths is None else self.lengths
        digest = hashlib.sha256(lengths.astype("<i8").tobytes())
        for row, length in zip(self.sequences, lengths, strict=True):
            digest.update(row[:length].astype("<i8").tobytes())
        return digest.hexdigest()


def read_calibration_data(
    text: Path,
    tokenizer_folder: Path,
    sequences: int,
    sequence_tokens: int,
    seed: int,
    vocab_size: int,
    *,
    packing: Packing = "packed",
    chat_template: bool = False,
    field: str | None = None,
) -> CalibrationData:
    """Draw that many sequences from a text file, a JSONL file or a folder, without overlap and in order.

    packing, chat_template and field are those of the recipe's section `calibration`. DataError when the text cannot be
    read, is too short or in an alphabet that the tokenizer does not know, or its tokens are not the model's.
    """
    corpus, tokenizer = read_corpus(text, field), Tokenizer.load(tokenizer_folder)
    documents = [_tokens(document, tokenizer, chat_template) for document in corpus.documents if document.is_filled]
    documents = [document for document in documents if len(document)]
    whole = np.concatenate([np.zeros(0, np.int64), *documents])
    if whole.size and whole.max() >= vocab_size:
        raise DataError(
            f"{text.name}: the tokenizer made token {whole.max()}, the model knows {vocab_size}; "
            "tokenizer and weights are not of the same checkpoint"
        )
    check_alphabet(text.name, whole, tokenizer)
    opening = [] if chat_template else [t for t in tokenizer.encode("") if t == tokenizer.bos_token_id][:1]
    asked = _Asked(corpus, len(whole), sequences, sequence_tokens, seed)
    if packing == "documents":
        return asked.by_document(documents, opening)
    closing = [] if chat_template or tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return asked.packed(documents, opening, [*closing, *opening])


@dataclass(frozen=True)
class _Asked:
    """What was asked for, of a corpus of that many tokens."""

    corpus: Corpus
    text_tokens: int
    sequences: int
    sequence_tokens: int
    seed: int

    def packed(self, documents: Sequence[Tokens], opening: list[int], between: list[int]) -> CalibrationData:
        """Sequences of one length."""
        parts = [part for document in documents for part in (between, document)][1:]
        stream = np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int64)
        taken = self.sequence_tokens - len(opening)
        available = len(stream) // max(taken, 1)
        if taken < 1 or available < self.sequences:
            raise DataError(self._too_short(f"{available} sequences of {self.sequence_tokens}", available))
        starts = self._drawn(available) * taken
        drawn = np.stack([np.concatenate([opening, stream[at : at + taken]]) for at in starts]).astype(np.int64)
        return CalibrationData(self._facts("packed", len(documents), drawn.size), drawn)

    def by_document(self, documents: Sequence[Tokens], opening: list[int]) -> CalibrationData:
        """Sequences of their own lengths, the shortest first, so that those that run together are about as long."""
        if len(documents) < self.sequences:
            raise DataError(self._too_short(f"{len(documents)} documents", len(documents)))
        cut = [np.concatenate([opening, documents[at]])[: self.sequence_tokens] for at in self._drawn(len(documents))]
        cut.sort(key=len)
        lengths = np.array([len(sequence) for sequence in cut], np.int64)
        drawn = np.zeros((len(cut), lengths.max()), np.int64)
        for row, sequence in zip(drawn, cut, strict=True):
            row[: len(sequence)] = sequence
        return CalibrationData(self._facts("documents", len(documents), int(lengths.sum())), drawn, lengths)

    def _drawn(self, available: int) -> Tokens:
        """Which of so many, in their order."""
        drawn: Tokens = np.sort(np.random.default_rng(self.seed).permutation(available)[: self.sequences])
        return drawn

    def _facts(self, packing: Packing, documents: int, tokens: int) -> CalibrationFacts:
        return CalibrationFacts(
            text=self.corpus.name,
            sha256=self.corpus.sha256,
            text_tokens=self.text_tokens,
            sequences=self.sequences,
            sequence_tokens=self.sequence_tokens,
            seed=self.seed,
            kind=self.corpus.kind,
            packing=packing,
            documents=documents,
            missing_tokens=self.sequences * self.sequence_tokens - tokens,
        )

    def _too_short(self, found: str, available: int) -> str:
        lower = (
            f"set calibration.sequences to {available} or less" if available else "lower calibration.sequence_tokens"
        )
        return (
            f"{self.corpus.name}: the text has {self.text_tokens} tokens, {found}; calibration asks for "
            f"{self.sequences}. Give a longer text, or {lower}"
        )


def _tokens(document: Document, tokenizer: Tokenizer, chat_template: bool) -> Tokens:
    """A document's tokens, without what the tokenizer adds at its ends."""
    return np.asarray(tokenizer.encode(_text(document, tokenizer, chat_template), add_special_tokens=False), np.int64)


def _text(document: Document, tokenizer: Tokenizer, chat_template: bool) -> str:
    if not chat_template and document.text is None:
        raise DataError(
            f"{document.place}: holds messages, which only a chat template turns into text; "
            "set calibration.chat_template=true"
        )
    if not chat_template:
        assert document.text is not None
        return document.text
    if document.messages is None:
        raise DataError(
            f"{document.place}: calibration.chat_template is true and this is plain text; give JSONL records with "
            "messages, or prompt and completion, or set calibration.chat_template=false"
        )
    try:
        return tokenizer.render_chat(document.messages, add_generation_prompt=False)
    except RequestError as error:
        raise DataError(f"{document.place}: calibration.chat_template is true: {error}") from error
