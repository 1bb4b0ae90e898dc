"""The vocabulary as the compiler of constraints sees it: the bytes of each token, as the detokenizer spells them.

Special tokens spell nothing, so no constraint allows them; a grammar may name one as <[ID]>. The ends of an output
differ from request to request. So the vocabulary has one token more, END, which a mask allows exactly where the text is
complete, and `matcher` allows the request's own end tokens where it allows END.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ingot.errors import RequestError
from ingot.runtime.text.tokenizer import Tokenizer
from ingot.version import install_command

if TYPE_CHECKING:
    import llguidance

_END = b"<|end of the output|>"
_BEFORE = "\x02"  # what a text continues, for tokenizers that begin one with a space; no token joins it with others


class TokenBytes:
    """Bytes of the tokens 0 .. vocab_size - 1 and of END, in the form that `llguidance.LLTokenizer` reads."""

    bos_token_id: int | None = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = vocab_size
        self.special_token_ids = [vocab_size]
        self.tokens: Sequence[bytes] = [*(self._spelled(token) for token in range(vocab_size)), _END]
        self._before = "" if self._keeps_the_beginning() else _BEFORE
        self._num_before = len(self._encoded(self._before))

    def _spelled(self, token_id: int) -> bytes:
        entry = self._tokenizer.token(token_id)
        if entry is None:  # special, or a row of the model without a token
            self.special_token_ids.append(token_id)
            return f"<|{token_id}|>".encode()
        piece = self._tokenizer.text_decoder.piece(entry, first=False)
        return piece if isinstance(piece, bytes) else piece.encode()

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokens of a text in the middle of an output, by which the compiler spells out what a grammar forces.

        SentencePiece puts a space before the text that it encodes, which is not there in the middle of one.
        """
        known = text.decode(errors="replace") if isinstance(text, bytes) else text
        return self._encoded(self._before + known)[self._num_before :]

    def _encoded(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _keeps_the_beginning(self) -> bool:
        """Whether the tokens of a text spell it without a space before it."""
        return b"".join(self.tokens[token] for token in self._encoded("a") if token < len(self.tokens)) == b"a"


def read_vocabulary(token_bytes: TokenBytes) -> "llguidance.LLTokenizer":
    """The compiler's form of a vocabulary: for 128,000 tokens about a second. RequestError without llguidance."""
    try:
        import llguidance
    except ImportError as error:
        raise RequestError(
            f"a constraint needs the package llguidance, which is not installed: {install_command('structured')}",
            field="constraint",
        ) from error
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(token_bytes))
