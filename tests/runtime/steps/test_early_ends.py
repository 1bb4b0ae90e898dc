"""A request that is cancelled or expires in any state changes no other, and leaves no block, least of all a wrong one.

Each test brings a request into one state, next to a mate, and ends it there. What it got so far is the beginning of its
answer; the mate, and the same request when it is made again, get the tokens that they get alone.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

from ingot.runtime.asking.outputs import Completion
from ingot.runtime.asking.request_options import RequestOptions
from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.engine.engine import Engine
from ingot.runtime.requests.beam_search import BeamParams
from ingot.runtime.scheduling.sequence import Sequence, SequenceState
from ingot.runtime.speculation.length_control import LengthControl
from ingot.runtime.speculation.speculator import Speculator
from tests.each_case import each_case
from tests.runtime.engines import VOCAB_SIZE, token_engine
from tests.runtime.kv.tiered_engines import tiered_engine
from tests.runtime.steps.test_deadlines import Clock
from tests.simulators.fake_drafters import KnowingDrafter
from tests.simulators.fake_executor import FakeExecutor
from tests.simulators.fake_host_blocks import Transfers
from tests.simulators.pipelined_executor import FakePipelinedExecutor

LONG = SamplingParams(max_tokens=30, ignore_eos=True)
PROMPT, MATE = tuple(range(22)), tuple(range(100, 109))
LIMIT = 10  # seconds
MOST_STEPS = 100


@cache
def alone(prompt: tuple[int, ...], params: SamplingParams = LONG) -> tuple[int, ...]:
    with token_engine() as engine:
        return engine.generate(list(prompt), params).token_ids


class Case:
    """An engine with tiers, a mate that runs in it, and a request."""

    def __init__(self, kind: type[FakeExecutor], state: str) -> None:
        sizes: dict[str, Any] = {"swapped": {"num_blocks": 17}, "prefilling": {"max_batch_tokens": 5}}
        self.clock, self.transfers = Clock(), Transfers()
        drafter = KnowingDrafter(lambda prompt, params: alone(prompt), VOCAB_SIZE, error_rate=0.3)
        control = LengthControl(adapts=False)
        self.engine: Engine = tiered_engine(
            kind,
            transfers=self.transfers,
            clock=self.clock,
            max_sequences=1 if state == "waiting" else 8,
            speculator=Speculator(drafter, vocab_size=VOCAB_SIZE, num_draft_tokens=3, control=control)
            if state == "speculating"
            else None,
            **{"num_blocks": 40, **sizes.get(state, {})},
        )
        if state == "loading":
            self.engine.generate(list(PROMPT), SamplingParams(max_tokens=1))
            for start in (0, 50):
                self.engine.generate([start + 120 + number % 40 for number in range(110)], SamplingParams(max_tokens=1))
        self.done: dict[int, Completion] = {}
        self.mate = self.engine.add(list(MATE), LONG)
        self.step()
        params = BeamParams(3, 30) if state == "beams" else LONG
        self.request = self.engine.add(list(PROMPT), params, options=RequestOptions(timeout_seconds=LIMIT))
        if state == "loading":
            self.transfers.moves = 0.0

    @property
    def sequence(self) -> Sequence:
        """The request's sequence; one of its beams."""
        open_requests = self.engine._loop.requests.by_sequence.values()
        return next(each.sequence for each in open_requests if each.id == self.request)

    def step(self) -> None:
        self.done |= {output.request_id: output.result for output in self.engine.step() if output.result}
        self.engine.check()

    def bring_to(self, is_there: Callable[["Case"], bool]) -> None:
        for _ in range(MOST_STEPS):
            if is_there(self):
                return
            self.step()
        raise AssertionError("the request never came into the state")

    def end(self, reason: str) -> Completion:
        """End the request here; nothing of it is held afterwards."""
        if reason == "abort":
            aborted = self.engine.abort(self.request)
            assert aborted is not None
            return aborted
        self.clock.now += LIMIT
        self.step()
        return self.done[self.request]

    def finish(self) -> None:
        self.transfers.moves = 1.0
        while self.engine.has_unfinished():
            self.step()


def num_drafted(case: Case) -> int:
    counters = case.engine.metrics().speculation
    return counters.num_tested_tokens if counters else 0


STATES: dict[str, Callable[[Case], bool]] = {
    "waiting": lambda case: case.sequence.state is SequenceState.WAITING,
    "loading": lambda case: case.sequence.state is SequenceState.LOADING,
    "prefilling": lambda case: 0 < case.sequence.num_computed < len(PROMPT) and case.sequence.num_pending > 1,
    "decoding": lambda case: case.sequence.num_generated >= 3,
    "swapped": lambda case: case.sequence.num_preemptions > 0 and case.sequence.state is SequenceState.WAITING,
    "speculating": lambda case: case.sequence.num_generated >= 3 and num_drafted(case) > 0,
    "beams": lambda case: case.sequence.num_generated >= 3,
}


@each_case("kind", [FakeExecutor, FakePipelinedExecutor])
@each_case("reason", ["abort", "timeout"])
@each_case("state", list(STATES))
def test_a_request_that_ends_in_any_state_changes_no_other(kind: type[FakeExecutor], reason: str, state: str) -> None:
    case = Case(kind, state)
    with case.engine as engine:
        case.bring_to(STATES[state])
        ended = case.end(reason)
        assert {choice.finish_reason for choice in ended.choices} == {reason}
        assert ended.error is None
        if state != "beams":
            assert ended.token_ids == alone(PROMPT)[: len(ended.token_ids)]
            assert (len(ended.token_ids) >= 3) == (state in ("decoding", "speculating")) or state == "swapped"
        case.finish()
        assert case.done[case.mate].token_ids == alone(MATE)
        assert engine.metrics().blocks_in_use == 0
        again = engine.generate(list(PROMPT), LONG)
        assert again.token_ids == alone(PROMPT)
        engine.check()
