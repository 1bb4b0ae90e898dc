"""Reads calibration data: tokenizes documents, forms sequences and chooses some of them at random by a seed.

    packed       documents end to end, cut into sequences of exactly `sequence_tokens`; documents are separated by the
                 EOS token, if the tokenizer has one, and the BOS token, if it adds one
    documents    one sequence per document, truncated to `sequence_tokens`; short ones stay short

Each sequence begins with the BOS token if the tokenizer adds one. A chat template writes its own special tokens: none
is added to rendered text. Text in an alphabet that the tokenizer does not cover is refused.
"""

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ingot.errors import DataError, RequestError
from ingot.passes.calibration import CalibrationFacts
from ingot.pipeline.calibrate.documents import Corpus, Document, read_corpus
from ingot.pipeline.calibrate.overlap import HeldOutText, checked_share, refuse_same_text
from ingot.runtime import Tokenizer

Packing = Literal["packed", "documents"]
Tokens = NDArray[np.int64]

# Share of tokens that do not decode to a whole character.
_REFUSED_SHARE = 0.5
_WARNED_SHARE = 0.1

_log = logging.getLogger("ingot.pipeline")


@dataclass(frozen=True)
class CalibrationData:
    """Token ids and their source.

    sequences [sequences, longest]; the rest of a row after its length is padding
    lengths   [sequences], tokens of each; None when every sequence fills its row
    """

    facts: CalibrationFacts
    sequences: Tokens
    lengths: Tokens | None = None

    @property
    def tokens(self) -> int:
        """Number of tokens in all sequences."""
        return self.sequences.size if self.lengths is None else int(self.lengths.sum())

    @property
    def fixed_tokens(self) -> int | None:
        """The length of every sequence; None when lengths differ."""
        return self.sequences.shape[1] if self.lengths is None else None

    @property
    def row_lengths(self) -> Tokens:
        """Tokens of each sequence [sequences]."""
        return np.full(len(self.sequences), self.sequences.shape[1]) if self.lengths is None else self.lengths

    def digest(self) -> str:
        """SHA-256 over every token and every length."""
        lengths = self.row_lengths
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
    template_file: Path | None = None,
    held_out: HeldOutText | None = None,
) -> CalibrationData:
    """Choose `sequences` sequences from a text file, a JSONL file or a folder, without overlap and in order.

    packing, chat_template and field are those of the recipe's section `calibration`; `template_file` replaces the
    tokenizer's own chat template. DataError when the text cannot be read, is too short or in an alphabet that the
    tokenizer does not cover, is the evaluation text `held_out` or holds most of it, or a token exceeds the model's
    vocabulary.
    """
    corpus, tokenizer = read_corpus(text, field), Tokenizer.load(tokenizer_folder, chat_template=template_file)
    if held_out is not None:
        refuse_same_text(corpus, held_out)
    documents = [_tokens(document, tokenizer, chat_template) for document in corpus.documents if document.is_filled]
    documents = [document for document in documents if len(document)]
    whole = np.concatenate([np.zeros(0, np.int64), *documents])
    if whole.size and whole.max() >= vocab_size:
        raise DataError(
            f"{text.name}: the tokenizer produced token {whole.max()}, but the model's vocabulary has {vocab_size}; "
            "tokenizer and weights are from different checkpoints"
        )
    _check_alphabet(text.name, whole, tokenizer)
    share = None if held_out is None else checked_share(corpus.name, documents, held_out.evaluated(tokenizer))
    opening = [] if chat_template else [t for t in tokenizer.encode("") if t == tokenizer.bos_token_id][:1]
    choice = _Choice(corpus, len(whole), sequences, sequence_tokens, seed, share)
    if packing == "documents":
        return choice.by_document(documents, opening)
    closing = [] if chat_template or tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return choice.packed(documents, opening, [*closing, *opening])


@dataclass(frozen=True)
class _Choice:
    """Number, length and seed of the sequences to choose from a corpus of `text_tokens` tokens."""

    corpus: Corpus
    text_tokens: int
    sequences: int
    sequence_tokens: int
    seed: int
    evaluation_overlap: float | None

    def packed(self, documents: Sequence[Tokens], opening: list[int], between: list[int]) -> CalibrationData:
        """Sequences of one length."""
        pieces = [piece for document in documents for piece in (between, document)][1:]
        stream = np.concatenate([np.zeros(0, np.int64), *pieces]).astype(np.int64)
        taken = self.sequence_tokens - len(opening)
        available = len(stream) // max(taken, 1)
        if taken < 1 or available < self.sequences:
            raise DataError(self._too_short(f"{available} sequences of {self.sequence_tokens}", available))
        starts = self._chosen(available) * taken
        rows = np.stack([np.concatenate([opening, stream[at : at + taken]]) for at in starts]).astype(np.int64)
        return CalibrationData(self._facts("packed", len(documents), rows.size), rows)

    def by_document(self, documents: Sequence[Tokens], opening: list[int]) -> CalibrationData:
        """Sequences of different lengths, sorted from short to long, so that sequences batched together are alike."""
        if len(documents) < self.sequences:
            raise DataError(self._too_short(f"{len(documents)} documents", len(documents)))
        cut = [np.concatenate([opening, documents[at]])[: self.sequence_tokens] for at in self._chosen(len(documents))]
        cut.sort(key=len)
        lengths = np.array([len(sequence) for sequence in cut], np.int64)
        rows = np.zeros((len(cut), lengths.max()), np.int64)
        for row, sequence in zip(rows, cut, strict=True):
            row[: len(sequence)] = sequence
        return CalibrationData(self._facts("documents", len(documents), int(lengths.sum())), rows, lengths)

    def _chosen(self, available: int) -> Tokens:
        """Sorted indices of the chosen sequences."""
        chosen: Tokens = np.sort(np.random.default_rng(self.seed).permutation(available)[: self.sequences])
        return chosen

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
            evaluation_overlap=self.evaluation_overlap,
        )

    def _too_short(self, found: str, available: int) -> str:
        lower = (
            f"set calibration.sequences to {available} or less" if available else "lower calibration.sequence_tokens"
        )
        return (
            f"{self.corpus.name}: the text has {self.text_tokens} tokens, {found}; calibration needs "
            f"{self.sequences}. Give a longer text, or {lower}"
        )


def _tokens(document: Document, tokenizer: Tokenizer, chat_template: bool) -> Tokens:
    """A document's tokens, without the special tokens that the tokenizer adds."""
    return np.asarray(tokenizer.encode(_text(document, tokenizer, chat_template), add_special_tokens=False), np.int64)


def _text(document: Document, tokenizer: Tokenizer, chat_template: bool) -> str:
    if not chat_template and document.text is None:
        raise DataError(
            f"{document.place}: the record has messages, which need the chat template; "
            "set calibration.chat_template=true"
        )
    if not chat_template:
        assert document.text is not None
        return document.text
    if document.messages is None:
        raise DataError(
            f"{document.place}: calibration.chat_template is true, but this is plain text; give JSONL records with "
            "messages, or prompt and completion, or set calibration.chat_template=false"
        )
    try:
        return tokenizer.render_chat(document.messages, add_generation_prompt=False)
    except RequestError as error:
        raise DataError(f"{document.place}: calibration.chat_template is true: {error}") from error


def _check_alphabet(name: str, tokens: Tokens, tokenizer: Tokenizer) -> None:
    """Refuse (DataError) or warn of a text with many tokens that do not decode to a whole character.

    Such a token is the unknown token, or a single byte of a character that is not in the vocabulary (a byte-fallback
    piece such as <0xD0>, or a byte of a byte-level BPE). Every tokenizer covers white space, which does not count.
    """
    ids, counts = np.unique(tokens, return_counts=True)
    texts = [_whole_text(int(token), tokenizer) for token in ids]
    unknown = sum(int(count) for text, count in zip(texts, counts, strict=True) if text is None)
    covered = sum(int(count) for text, count in zip(texts, counts, strict=True) if text and not text.isspace())
    share = unknown / max(1, unknown + covered)
    if share <= _WARNED_SHARE:
        return
    found = (
        f"{name}: {share:.0%} of the text's tokens ({unknown:,} of {unknown + covered:,}, white space not counted) are "
        "unknown to the tokenizer or single bytes of a character"
    )
    if share > _REFUSED_SHARE:
        raise DataError(
            f"{found}; refused above {_REFUSED_SHARE:.0%}. Give text in the languages that the model was trained on"
        )
    _log.warning("%s; text in languages that the model was not trained on is poor calibration data", found)


def _whole_text(token: int, tokenizer: Tokenizer) -> str | None:
    """The token's text; None for the unknown token and for part of a character."""
    text = tokenizer.decode([token], skip_special_tokens=False)
    return None if token == tokenizer.unk_token_id or "\ufffd" in text else text
