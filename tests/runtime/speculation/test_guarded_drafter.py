"""What a drafter proposes is made usable: unusable drafts are cut, time is measured, errors are counted."""

from collections.abc import Sequence

from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.requests.sampler import Sampler
from ingot.runtime.scheduling import sequence as steps
from ingot.runtime.speculation.counters import SpeculationCounters
from ingot.runtime.speculation.drafter import DraftRequest, Proposal
from ingot.runtime.speculation.guarded_drafter import MOST_FAILURES, GuardedDrafter
from ingot.runtime.speculation.step_times import DraftTimes
from tests.each_case import each_case
from tests.simulators.fake_drafters import FakeDrafter

VOCAB = 8


class Fixed(FakeDrafter):
    """Proposes the same for every request; a model's call takes a second."""

    def __init__(self, *proposals: Proposal | Exception, is_free: bool = True) -> None:
        super().__init__()
        self.is_free = is_free
        self._proposals = list(proposals)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        self.num_calls += 1
        found = self._proposals[(self.num_calls - 1) % len(self._proposals)]
        if isinstance(found, Exception):
            raise found
        return [found] * len(requests)


def request(num_tokens: int = 4) -> DraftRequest:
    sequence = steps.Sequence.of(1, [1, 2, 3], 100)
    return DraftRequest(sequence, Sampler(SamplingParams(), sequence.tokens), num_tokens)


def guarded(drafter: FakeDrafter) -> GuardedDrafter:
    return GuardedDrafter(drafter, VOCAB, DraftTimes(), SpeculationCounters())


def clock_of_seconds() -> float:
    clock_of_seconds.now += 1.0  # type: ignore[attr-defined]
    return float(clock_of_seconds.now)  # type: ignore[attr-defined]


clock_of_seconds.now = 0.0  # type: ignore[attr-defined]


@each_case(
    ("proposal", "expected"),
    [
        (Proposal((1, 2), (0, 7)), Proposal((1, 2), (0, 7), "fake")),
        (Proposal((1, 2), (0, 7), "own"), Proposal((1, 2), (0, 7), "own")),
        (Proposal((1,) * 9, (0,) * 9), Proposal((1,) * 4, (0,) * 4, "fake")),
        (Proposal((1, VOCAB, 2), (0, 0, 0)), Proposal((1,), (0,), "fake")),
        (Proposal((1, 2), (0, 8)), Proposal((1,), (0,), "fake")),
        (Proposal((-1,), (0,)), Proposal((), (), "fake")),
        (Proposal(), Proposal()),
    ],
)
def test_a_proposal_is_cut_to_what_can_be_verified(proposal: Proposal, expected: Proposal) -> None:
    assert guarded(Fixed(proposal)).propose([request()], clock_of_seconds) == [expected]


def test_failures_in_a_row_turn_it_off() -> None:
    drafter = guarded(Fixed(OSError("lost"), OSError("lost"), Proposal((1,), (0,))))
    for _ in range(4):
        drafter.propose([request()], clock_of_seconds)
        assert drafter.is_on
    broken = guarded(Fixed(Proposal((1, 2), (0,))))
    for _ in range(MOST_FAILURES):
        assert broken.propose([request()], clock_of_seconds) == [Proposal()]
    assert not broken.is_on


def test_the_time_of_a_model_is_measured_and_that_of_a_free_drafter_is_part_of_the_step() -> None:
    model = guarded(Fixed(Proposal((1,), (0,)), is_free=False))
    model.propose([request()], clock_of_seconds)
    assert (model.elapsed, model.seconds) == (1.0, 1.0)
    model.begin()
    assert model.elapsed == 0.0
    free = guarded(Fixed(Proposal((1,), (0,))))
    free.propose([request()], clock_of_seconds)
    assert free.elapsed == 0.0
