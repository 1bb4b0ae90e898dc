"""The state of one constrained sequence: which tokens may follow, as bits over the vocabulary.

A matcher follows the output tokens of its request, so preemption, prefix hits and a step that is repeated do not
concern it. Masks are computed for a step's rows while the model computes the logits (`MaskWorker`): one for the next
token, and one after each draft. A mask depends on the tokens alone, never on the time at which it was computed.
"""

import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ingot.errors import EngineError
from ingot.runtime.constraints.constraint import FIELD
from ingot.runtime.constraints.trials import lacks_tokens, without_state

if TYPE_CHECKING:
    import llguidance

Mask = NDArray[np.uint32]  # [words]; bit i % 32 of word i // 32 is set where token i is allowed
_ONE = np.uint32(1)
_MOST_FORCED_SECONDS = 0.005


class ConstraintFailed(EngineError):
    """A constraint cannot be followed further: its parser exceeded a limit, or it allows no token.

    lacks_tokens  whether the vocabulary spells nothing that may follow
    """

    field = FIELD

    def __init__(self, reason: str) -> None:
        self.lacks_tokens = lacks_tokens(reason)
        said = f"({without_state(reason)}); make it simpler"
        if self.lacks_tokens:
            said = "(no token of the vocabulary spells what must follow); leave out characters that no token spells"
        super().__init__(f"the constraint cannot be followed further {said}")


class Matcher:
    """Follows one sequence; made by `Grammar.matcher`.

    end_token_ids  tokens that end the output: allowed exactly where the text is complete, though they spell nothing
    new            makes another parser, for when the limits of this one were exceeded by other sequences; None: that
                   takes too long within a step
    drafts_forced  whether `forced` finds texts: not where it takes long
    """

    def __init__(
        self,
        native: "llguidance.LLMatcher",
        vocabulary: "llguidance.LLTokenizer",
        end_token_ids: Collection[int],
        new: "Callable[[], llguidance.LLMatcher] | None",
        followed: Sequence[int] = (),
        *,
        drafts_forced: bool = True,
    ) -> None:
        self._native = native
        self._vocabulary = vocabulary
        self._new = new
        self._followed = [*followed]
        self._drafts_forced = drafts_forced
        self._renewed_at = -1  # the number of tokens followed then
        self._end = vocabulary.eos_token  # END, the last token
        self._end_token_ids = tuple(end_token_ids)
        self._ahead: Sequence[Mask] = ()  # masks of the next token and of those after each draft, if prepared
        self._drafts: Sequence[int] = ()

    def fork(self) -> "Matcher":
        """The same state, for another sequence."""
        return Matcher(
            self._native.deep_copy(), self._vocabulary, self._end_token_ids, self._new, self._followed,
            drafts_forced=self._drafts_forced,
        )  # fmt: skip

    @property
    def is_complete(self) -> bool:
        """Whether the text is complete and nothing can follow."""
        is_stopped: bool = self._native.is_stopped()
        return is_stopped

    def consume(self, token_id: int) -> None:
        """Advance by a token that its mask allows and that does not end the output. Raises ConstraintFailed."""
        is_drafted = bool(self._drafts) and self._drafts[0] == token_id
        self._ahead, self._drafts = (self._ahead[1:], self._drafts[1:]) if is_drafted else ((), ())
        if not self._native.consume_token(token_id):
            self._renew(ConstraintFailed(self._native.get_error()))
            if not self._native.consume_token(token_id):
                raise ConstraintFailed(self._native.get_error())
        self._followed.append(token_id)

    def _renew(self, failure: ConstraintFailed) -> None:
        """After a failure, go on with a parser that no other sequence has used. Raises ConstraintFailed if that fails
        too: the reason is this sequence's own.
        """
        if failure.lacks_tokens or self._new is None or self._renewed_at == len(self._followed):
            raise failure
        self._renewed_at = len(self._followed)
        self._native = self._new()
        for token_id in self._followed:
            if not self._native.consume_token(token_id):
                raise ConstraintFailed(self._native.get_error())

    def num_allowed(self, tokens: Sequence[int]) -> int:
        """How many of these tokens may follow, in order."""
        return max(0, int(self._native.validate_tokens(list(tokens))))  # -1 once it has failed

    def forced_text(self) -> bytes:
        """The text that must follow; it may end within a character."""
        text: bytes = self._native.compute_ff_bytes()
        return text

    def forced(self) -> list[int]:
        """Tokens that spell the text that must follow, as the tokenizer would. Others may spell the same text.

        `num_allowed` says how many of them may follow: a tokenizer can fail to spell a part of a text.
        """
        if not self._drafts_forced:
            return []
        begun = time.thread_time()
        text = self.forced_text()
        # A long text holds up all requests of a step, again and again; drafts only save time.
        self._drafts_forced = time.thread_time() - begun <= _MOST_FORCED_SECONDS
        tokens: list[int] = self._vocabulary.tokenize_partial(text)[0] if text and self._drafts_forced else []
        return tokens

    @property
    def masks_ahead(self) -> Sequence[Mask]:
        """The masks that were prepared: of the next token, and of those after each draft of the step."""
        return self._ahead

    def mask(self) -> Mask:
        """The mask of the next token, computed now unless it was prepared. Raises ConstraintFailed."""
        if not self._ahead:
            self.prepare(())
        return self._ahead[0]

    def prepare(self, drafts: Sequence[int]) -> None:
        """Compute the mask of the next token, and those after each of its drafts, which must be allowed."""
        self._ahead, self._drafts = (), ()
        try:
            masks = self._masks(drafts)
        except ConstraintFailed as failure:
            self._renew(failure)
            masks = self._masks(drafts)
        for mask in masks:
            self._allow_ends(mask)
        self._ahead, self._drafts = list(masks), drafts

    def _masks(self, drafts: Sequence[int]) -> NDArray[np.uint32]:
        """Masks [1 + drafts, words], without the request's end tokens.

        A copy follows the drafts, in a microsecond: after `rollback` and `compute_ff_bytes` llguidance 1.9 computes
        wrong masks.
        """
        masks = self._new_masks(1 + len(drafts))
        native = self._native.deep_copy() if drafts else self._native
        native.unsafe_compute_mask_ptr(masks[0].ctypes.data, masks[0].nbytes)
        for mask, draft in zip(masks[1:], drafts, strict=True):
            if not native.consume_token(draft):
                raise ConstraintFailed(native.get_error())
            native.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if native.is_error():
            raise ConstraintFailed(native.get_error())
        return masks

    def _new_masks(self, count: int) -> NDArray[np.uint32]:
        return np.zeros((count, (self._end + 32) // 32), np.uint32)  # [rows, words]

    def _allow_ends(self, mask: Mask) -> None:
        """Allow the request's end tokens where END is allowed, and there alone."""
        is_end = mask[self._end >> 5] >> np.uint32(self._end & 31) & _ONE
        for token_id in self._end_token_ids:
            bit = _ONE << np.uint32(token_id & 31)
            mask[token_id >> 5] = mask[token_id >> 5] | bit if is_end else mask[token_id >> 5] & ~bit


class MaskWorker:
    """A thread that prepares the masks of a step."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None

    def start(self, entries: Sequence[tuple[Matcher, Sequence[int]]]) -> Callable[[], object]:
        """Prepare masks for matchers, each with the drafts of its step; call what this returns to wait for them.

        A matcher that fails is left without masks, so that `Matcher.mask` raises for its own request.
        """
        if not entries:
            return _nothing
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "ingot-masks")
        done: Future[None] = self._thread.submit(_prepare_all, entries)
        return done.result

    def close(self) -> None:
        """End the thread. Idempotent."""
        if self._thread:
            self._thread.shutdown()
            self._thread = None


def _nothing() -> None:
    pass


def _prepare_all(entries: Sequence[tuple[Matcher, Sequence[int]]]) -> None:
    for matcher, drafts in entries:
        with suppress(ConstraintFailed):  # `mask` computes again what fails, and raises
            matcher.prepare(drafts)
