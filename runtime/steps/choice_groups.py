"""Several choices of one prompt (n, best_of): sequences that share the prompt's blocks and are sampled apart.

Choice 0 is the request that the scheduler gets. In the step that computes its prompt's last token, every choice samples
its first token from that row of logits, and the others are forked: their block tables name the same blocks, and the
first to write to a shared block copies it (`BlockManager.reserve`). From then on each is scheduled, preempted and ended
by itself. So each gets the tokens of a request of its own with its seed, and a choice that fails ends alone.
"""

from collections.abc import Sequence
from dataclasses import replace

from ingot.runtime.asking.outputs import Completion, RequestOutput, ranked_outputs
from ingot.runtime.requests.request import Request
from ingot.runtime.scheduling.sequence import SequenceState


class ChoiceGroup:
    """The choices of one request, in order of index, and what they have given so far."""

    def __init__(self, choices: Sequence[Request]) -> None:
        assert len(choices) > 1
        self.id = choices[0].id
        self.is_forked = False
        self._choices = tuple(choices)
        self._completions: dict[int, Completion] = {}
        self._params = choices[0].sampler.params
        for child in choices[1:]:
            child.sequence.state = SequenceState.UNFORKED

    @property
    def first(self) -> Request:
        """The choice that computes the prompt."""
        return self._choices[0]

    @property
    def open(self) -> list[Request]:
        """Choices that have not ended."""
        return [choice for choice in self._choices if choice.index not in self._completions]

    @property
    def is_finished(self) -> bool:
        """Whether all choices have ended."""
        return len(self._completions) == len(self._choices)

    def fork(self) -> list[Request]:
        """The choices to start now that the first has the prompt."""
        assert not self.is_forked
        self.is_forked = True
        children = self.open[1:]
        for child in children:
            child.follow(self.first)
        return children

    def collect(self, output: RequestOutput) -> list[RequestOutput]:
        """Outputs to show after one of a choice. With best_of above n they come at the end."""
        if output.completion:
            self._completions[output.index] = output.completion
        if not self._params.ranks_samples:
            return [replace(output, result=self._result() if self.is_finished else None)]
        return self._best() if self.is_finished else []

    def _in_order(self) -> list[Completion]:
        return [self._completions[index] for index in range(len(self._choices))]

    def _result(self) -> Completion:
        first, *others = self._in_order()
        return replace(first, others=tuple(others))

    def _best(self) -> list[RequestOutput]:
        """One output for each of the n best choices: its whole text and tokens. Their rank is their index."""
        ranked = sorted(self._in_order(), key=_rank)
        found, left_out = ranked[: self._params.n], ranked[self._params.n :]
        unreturned = sum(len(completion.token_ids) for completion in left_out)
        return ranked_outputs(
            [(completion, self._choices[completion.index].tokens) for completion in found], unreturned
        )


def _rank(completion: Completion) -> tuple[bool, float, int]:
    """Sorts the best choice first: failed ones last, then by mean log-probability, then by index."""
    mean = completion.mean_logprob
    return completion.error is not None, float("inf") if mean is None else -mean, completion.index
