"""Grammars of the demo model's vocabulary, for tests."""

from functools import cache

import numpy as np

from ingot.runtime.constraints import Constraint
from ingot.runtime.constraints.compiler import ConstraintCompiler
from ingot.runtime.constraints.matcher import Mask, Matcher
from tests.runtime.engines import demo_tokenizer

END = 0  # the demo model's end token
NAMES = ["alpha", "beta", "gamma, delta", 'a "quoted" one', "é漢😀", "a/b\\c", "(x|y)*", "two\nlines", "alphabet"]


@cache
def compiler() -> ConstraintCompiler:
    return ConstraintCompiler(demo_tokenizer(), demo_tokenizer().vocab_size)


def matcher(constraint: Constraint, ends: tuple[int, ...] = (END,)) -> Matcher:
    return compiler().compile(constraint).matcher(ends)


def allowed(mask: Mask) -> list[int]:
    """Ids of the tokens that a mask allows."""
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: demo_tokenizer().vocab_size]
    return np.flatnonzero(bits).tolist()


def spelled(token_id: int) -> bytes:
    """Bytes of a token."""
    entry = demo_tokenizer().token(token_id)
    piece = demo_tokenizer().text_decoder.piece(entry, first=False) if entry is not None else ""
    return piece if isinstance(piece, bytes) else piece.encode()
