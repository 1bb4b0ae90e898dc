"""Drafters for tests: they know the answer, guess, are wrong on purpose, violate their contract, or fail."""

import random
from collections.abc import Callable, Sequence

from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.scheduling import sequence as steps
from ingot.runtime.speculation.drafter import NUM_GRADES, DraftRequest, Proposal

PlainTokens = Callable[[tuple[int, ...], SamplingParams], Sequence[int]]
"""The tokens that a request gets without speculation, from its prompt and parameters."""


class FakeDrafter:
    """Proposes nothing. The base of the others; it counts its calls and the sequences that it has yet to forget."""

    kind = "fake"
    is_free = True

    def __init__(self) -> None:
        self.num_calls = 0
        self.known: set[int] = set()
        self.closed = False

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """Proposals of `draft`, all with one grade."""
        self.num_calls += 1
        self.known |= {request.sequence.id for request in requests}
        drafts = [tuple(self.draft(request)) for request in requests]
        return [Proposal(tokens, (number % NUM_GRADES,) * len(tokens)) for number, tokens in enumerate(drafts)]

    def draft(self, request: DraftRequest) -> Sequence[int]:
        """The drafts for one request."""
        return ()

    def catch_up_tokens(self, sequence: steps.Sequence) -> int:
        """Always 0."""
        return 0

    def forget(self, sequence: steps.Sequence) -> None:
        """Count the sequence as forgotten."""
        self.known.discard(sequence.id)

    def close(self) -> None:
        """Set `closed`."""
        self.closed = True


class KnowingDrafter(FakeDrafter):
    """Proposes the tokens of plain decoding, each replaced by another one with probability `error_rate`."""

    def __init__(self, plain: PlainTokens, vocab_size: int, error_rate: float = 0.0, seed: int = 0) -> None:
        super().__init__()
        self._plain, self._vocab_size, self._error_rate = plain, vocab_size, error_rate
        self._random = random.Random(seed)

    def draft(self, request: DraftRequest) -> Sequence[int]:
        """The tokens that follow, some of them wrong."""
        sequence = request.sequence
        expected = self._plain(tuple(sequence.tokens[: sequence.num_prompt_tokens]), request.sampler.params)
        following = expected[sequence.num_generated : sequence.num_generated + request.num_tokens]
        return [self._changed(token) if self._random.random() < self._error_rate else token for token in following]

    def _changed(self, token: int) -> int:
        return (token + 1 + self._random.randrange(self._vocab_size - 1)) % self._vocab_size


class RandomDrafter(FakeDrafter):
    """Proposes random tokens, of random number."""

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        super().__init__()
        self._vocab_size, self._random = vocab_size, random.Random(seed)

    def draft(self, request: DraftRequest) -> Sequence[int]:
        """Random tokens."""
        return [self._random.randrange(self._vocab_size) for _ in range(self._random.randrange(request.num_tokens + 1))]


class HostileDrafter(FakeDrafter):
    """Violates the contract in every way: unusable tokens, too many of them, wrong grades, and errors."""

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        super().__init__()
        self._vocab_size, self._random = vocab_size, random.Random(seed)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """Unusable proposals, or an error; now and then usable ones."""
        self.num_calls += 1
        kind = self._random.randrange(6)
        usable = [Proposal((self._random.randrange(self._vocab_size),) * 3, (0,) * 3) for _ in requests]
        if kind == 0:
            raise OSError("the drafter's memory is lost")
        if kind == 1:
            return usable[1:]  # one too few
        if kind == 2:
            return [Proposal((self._vocab_size, -1, 2**63), (0,) * 3) for _ in requests]
        if kind == 3:
            return [Proposal((0,) * 500, (0,) * 500) for _ in requests]
        if kind == 4:
            return [Proposal((0, 1), (NUM_GRADES, -1)) if index % 2 else one for index, one in enumerate(usable)]
        return usable
