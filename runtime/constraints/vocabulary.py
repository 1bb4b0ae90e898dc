"""The vocabulary as the compiler of constraints sees it: the bytes of each token, as the detokenizer spells them.

Special tokens spell nothing, so no constraint allows them; a grammar may name one as <[ID]>. The ends of an output
differ from request to request. So the vocabulary has one token more, END, which a mask allows exactly where the text is
complete, and `matcher` allows the request's own end tokens where it allows END.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ingot.errors import RequestError
from ingot.runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import llguidance

_END = b"<|end of the output|>"


class TokenBytes:
    """Bytes of the tokens 0 .. vocab_size - 1 and of END, in the form that `llguidance.LLTokenizer` reads."""

    bos_token_id: int | None = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = vocab_size
        self.special_token_ids = [vocab_size]
        self.tokens: Sequence[bytes] = [*(self._spelled(token) for token in range(vocab_size)), _END]

    def _spelled(self, token_id: int) -> bytes:
        entry = self._tokenizer.token(token_id)
        if entry is None:  # special, or a row of the model without a token
            self.special_token_ids.append(token_id)
            return f"<|{token_id}|>".encode()
        piece = self._tokenizer.text_decoder.piece(entry, first=False)
        return piece if isinstance(piece, bytes) else piece.encode()

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokens of a text, by which the compiler spells out what a grammar forces."""
        known = text.decode(errors="replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(known, add_special_tokens=False)


def read_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> "llguidance.LLTokenizer":
    """The compiler's form of a vocabulary: for 128,000 tokens about a second. RequestError without llguidance."""
    try:
        import llguidance
    except ImportError as error:
        raise RequestError(
            "a constraint needs the package llguidance, which is not installed: pip install 'ingot[structured]'",
            field="constraint",
        ) from error
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(TokenBytes(tokenizer, vocab_size)))
