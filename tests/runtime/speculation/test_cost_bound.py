"""Speculation never takes longer than plain decoding by more than 1 / 0.97, whatever its drafter does: in model time.

A clock advances by what each step, each look for drafts and each draft of a model costs.
"""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.engine.engine import Engine
from ingot.runtime.forward_batch import FloatArray, ForwardBatch
from ingot.runtime.scheduling import sequence as steps
from ingot.runtime.speculation.counters import SpeculationMetrics
from ingot.runtime.speculation.drafter import DraftRequest, Proposal
from ingot.runtime.speculation.length_control import LengthControl
from ingot.runtime.speculation.speculator import Speculator
from tests.each_case import each_case
from tests.simulators.fake_drafters import FakeDrafter
from tests.simulators.fake_executor import FakeExecutor
from tests.simulators.layered_executor import LayeredExecutor
from tests.simulators.pipelined_executor import FakePipelinedExecutor, FakeStep

VOCAB = 16
MOST_TOKENS = 400
CONTEXT = MOST_TOKENS + 100
NUM_REQUESTS = 6
LOWEST_SPEED = 0.97


class Clock:
    """Model time, in plain steps of one sequence."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@dataclass(frozen=True)
class Costs:
    """Plain steps that things take: a further row of a step, a look of a drafter, a draft of a model."""

    row: float = 0.2
    look: float = 0.05
    draft: float = 0.0
    catch_up_token: float = 0.0


CHEAP, STEEP = Costs(0.05, 0.02), Costs(row=0.9, look=0.3)
COSTS = [CHEAP, Costs(), STEEP]
MODEL = Costs(row=0.2, look=0.03, draft=0.4, catch_up_token=0.1)


class TimedExecutor(FakeExecutor):
    """A step takes 1 and `costs.row` for each row but one of every sequence."""

    def __init__(self, clock: Clock, costs: Costs) -> None:
        super().__init__(vocab_size=VOCAB, context_tokens=CONTEXT, num_blocks=400, max_sequences=8)
        self.clock, self.costs = clock, costs

    def forward(self, batch: ForwardBatch) -> FloatArray:
        self.clock.now += step_time(batch, self.costs)
        return super().forward(batch)


class TimedReplayingExecutor(LayeredExecutor):
    """The same for a model with side state."""

    def __init__(self, clock: Clock, costs: Costs) -> None:
        super().__init__("side state", vocab_size=VOCAB, num_blocks=400, context_tokens=CONTEXT, num_states=30)
        self.clock, self.costs = clock, costs

    def forward(self, batch: ForwardBatch) -> FloatArray:
        self.clock.now += step_time(batch, self.costs)
        return super().forward(batch)


def step_time(batch: ForwardBatch, costs: Costs) -> float:
    more = batch.num_tokens - len(batch.context_lens)
    return 1 + costs.row * more / len(batch.context_lens)


Trace = Callable[[int, int], bool]
"""Whether the drafts of a look are right, by its number and the one of the sequence's next token."""


class TracedDrafter(FakeDrafter):
    """Right or wrong as a trace has it. A model's drafts take time, and so does to catch up with a sequence."""

    def __init__(self, trace: Trace, expected: Sequence[int], clock: Clock, costs: Costs, kind: str = "traced") -> None:
        super().__init__()
        self.kind = kind
        self.is_free = not costs.draft
        self._trace, self._expected, self._clock, self._costs = trace, expected, clock, costs
        self._num_computed: dict[int, int] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        self._clock.now += self._costs.look
        if not self.is_free:
            most = max(request.num_tokens for request in requests)
            missing = sum(self.catch_up_tokens(request.sequence) for request in requests)
            self._clock.now += most * self._costs.draft + missing * self._costs.catch_up_token
        for request in requests:
            self._num_computed[request.sequence.id] = len(request.sequence.tokens)
        return super().propose(requests)

    def draft(self, request: DraftRequest) -> Sequence[int]:
        start = request.sequence.num_generated
        tokens = self._expected[start : start + request.num_tokens]
        return tokens if self._trace(self.num_calls, start) else [(token + 1) % VOCAB for token in tokens]

    def catch_up_tokens(self, sequence: steps.Sequence) -> int:
        return 0 if self.is_free else len(sequence.tokens) - self._num_computed.get(sequence.id, 0)


def alternates_while_on() -> Trace:
    """Right until drafts are verified at full length, then wrong until drafting stops, and so on."""
    state = {"right": True, "last": 0}

    def is_right(call: int, start: int) -> bool:
        given, state["last"] = start - state["last"], start
        if given >= 8:
            state["right"] = False
        elif given == 1:
            state["right"] = True
        return bool(state["right"])

    return is_right


def coin(seed: int, rate: float) -> Trace:
    rng = random.Random(seed)
    return lambda call, start: rng.random() < rate


TRACES: dict[str, Callable[[], Trace]] = {
    "always wrong": lambda: lambda call, start: False,
    "alternately right and wrong": lambda: lambda call, start: call % 2 == 0,
    "right, then wrong for good": lambda: lambda call, start: call < 40,
    "right until it is on, wrong until it is off": alternates_while_on,
    "right in every third stretch of text": lambda: lambda call, start: start // 50 % 3 == 0,
    "a third are right": lambda: coin(1, 0.33),
    "a tenth are right": lambda: coin(2, 0.1),
}


MakeExecutor = Callable[[Clock, Costs], FakeExecutor | LayeredExecutor]
PARAMS = SamplingParams(max_tokens=MOST_TOKENS)


def prompts_of(num_at_once: int) -> list[list[int]]:
    """A few at once, so that steps are full to the end."""
    return [[1, 2, 3]] * (num_at_once * NUM_REQUESTS)


@cache
def plain_decoding(costs: Costs, executor: MakeExecutor, num_at_once: int) -> tuple[float, tuple[int, ...]]:
    """Time of plain decoding, and the tokens of a request; every trace is compared with the same."""
    clock = Clock()
    with Engine(executor(clock, costs), max_sequences=num_at_once) as engine:
        expected = engine.generate([1, 2, 3], PARAMS).token_ids
        clock.now = 0.0
        engine.generate(prompts_of(num_at_once), PARAMS)
    return clock.now, expected


Kinds = Sequence[tuple[Trace, Costs]]
"""Drafters of an engine: whether each is right, and what its looks and drafts cost."""


def speed(trace: Trace, costs: Costs, executor: MakeExecutor, num_at_once: int) -> tuple[float, int]:
    """Time of plain decoding in that of speculation, and the number of drafts that were verified."""
    found, metrics = speed_of([(trace, costs)], costs, executor, num_at_once)
    return found, metrics.num_draft_tokens


def speed_of(kinds: Kinds, costs: Costs, executor: MakeExecutor, num_at_once: int) -> tuple[float, SpeculationMetrics]:
    """The same with several drafters, "kind 0" and so on; a row of a step costs what it does in `costs`."""
    plain, expected = plain_decoding(costs, executor, num_at_once)
    clock = Clock()
    replays = executor is TimedReplayingExecutor
    drafters = [
        TracedDrafter(trace, expected, clock, each, f"kind {number}") for number, (trace, each) in enumerate(kinds)
    ]
    speculator = Speculator(*drafters, vocab_size=VOCAB, control=LengthControl(replays=replays))
    with Engine(executor(clock, costs), max_sequences=num_at_once, speculator=speculator, clock=clock) as engine:
        engine.generate([1, 2, 3], SamplingParams(max_tokens=1))
        clock.now = 0.0
        for done in engine.generate(prompts_of(num_at_once), PARAMS):
            assert done.token_ids == expected
        found = engine.metrics().speculation
    assert found is not None
    return plain / clock.now, found


@each_case("name", TRACES)
@each_case(("costs", "num_at_once"), [*((costs, 1) for costs in COSTS), (Costs(), 4)])
def test_copied_drafts(name: str, costs: Costs, num_at_once: int) -> None:
    found, num_drafts = speed(TRACES[name](), costs, TimedExecutor, num_at_once)
    assert found > LOWEST_SPEED
    assert num_drafts > 0


@each_case("name", TRACES)
@each_case("costs", [CHEAP, STEEP])
def test_models_with_side_state(name: str, costs: Costs) -> None:
    found, num_drafts = speed(TRACES[name](), costs, TimedReplayingExecutor, 1)
    assert found > LOWEST_SPEED
    assert num_drafts > 0


@each_case("name", TRACES)
def test_drafts_of_a_model(name: str) -> None:
    found, num_drafts = speed(TRACES[name](), MODEL, TimedExecutor, 1)
    assert found > LOWEST_SPEED
    assert num_drafts > 0


@cache
def speed_alone(kind: tuple[Trace, Costs], num_at_once: int) -> float:
    """Speed with one drafter whose trace has no state."""
    return speed_of([kind], Costs(), TimedExecutor, num_at_once)[0]


FREE, SLOW, FAST = Costs(), MODEL, Costs(look=0.03, draft=0.1, catch_up_token=0.02)
RUINOUS = Costs(look=0.3, draft=5.0, catch_up_token=0.1)
SETS: dict[str, list[Costs]] = {
    "a copy and a model": [FREE, SLOW],
    "two copies and a fast model": [FREE, CHEAP, FAST],
    "a copy and two models": [FREE, FAST, SLOW],
    "a copy and a model that is slower than the target": [FREE, RUINOUS],
    "two models": [SLOW, RUINOUS],
}


@each_case("name", TRACES)
@each_case("chosen", SETS)
def test_sets_of_drafters(name: str, chosen: str) -> None:
    found, _ = speed_of([(TRACES[name](), each) for each in SETS[chosen]], Costs(), TimedExecutor, 1)
    assert found > LOWEST_SPEED


@each_case("chosen", SETS)
def test_sets_whose_drafters_turn_wrong_at_different_times(chosen: str) -> None:
    """Each drafter follows another trace, so that one is trusted while the next turns wrong."""
    for first, num_at_once in ((2, 1), (3, 4)):
        names = itertools.islice(itertools.cycle(TRACES), first, None)
        kinds = [(TRACES[name](), each) for name, each in zip(names, SETS[chosen], strict=False)]
        assert speed_of(kinds, Costs(), TimedExecutor, num_at_once)[0] > LOWEST_SPEED


@each_case("name", TRACES)
def test_sets_of_drafters_for_models_with_side_state(name: str) -> None:
    kinds = [(TRACES[name](), FREE), (coin(3, 0.5), SLOW)]
    assert speed_of(kinds, Costs(), TimedReplayingExecutor, 1)[0] > LOWEST_SPEED


def always(call: int, start: int) -> bool:
    return True


def never(call: int, start: int) -> bool:
    return False


def in_first_half(call: int, start: int) -> bool:
    return start < MOST_TOKENS // 2


def in_second_half(call: int, start: int) -> bool:
    return start >= MOST_TOKENS // 2


@each_case("model", [SLOW, FAST])
@each_case("num_at_once", [1, 4])
def test_where_one_kind_is_right_a_set_is_as_fast_as_that_kind_alone_or_nearly(model: Costs, num_at_once: int) -> None:
    for copy_is_right, model_is_right in ((always, never), (never, always), (always, always)):
        alone = [speed_alone(each, num_at_once) for each in ((copy_is_right, FREE), (model_is_right, model))]
        found, metrics = speed_of([(copy_is_right, FREE), (model_is_right, model)], Costs(), TimedExecutor, num_at_once)
        assert found > 0.95 * max(alone)
        better = "kind 0" if copy_is_right is always else "kind 1"
        accepted = metrics.num_accepted_tokens_by_kind
        assert accepted[better] > 0.95 * metrics.num_accepted_tokens


def test_the_kind_changes_where_the_text_does() -> None:
    for first, second in ((in_first_half, in_second_half), (in_second_half, in_first_half)):
        kinds = [(first, FREE), (second, FAST)]
        alone = [speed_alone(each, 1) for each in kinds]
        found, metrics = speed_of(kinds, Costs(), TimedExecutor, 1)
        assert found > 1.2 * max(alone)
        accepted = metrics.num_accepted_tokens_by_kind
        assert min(accepted["kind 0"], accepted["kind 1"]) > 0.3 * metrics.num_accepted_tokens


def test_right_drafts_are_faster_than_plain_decoding() -> None:
    assert speed(always, CHEAP, TimedExecutor, 1)[0] > 4
    assert speed(always, Costs(), TimedExecutor, 1)[0] > 2
    assert speed(always, Costs(), TimedReplayingExecutor, 1)[0] > 2
    assert speed(always, MODEL, TimedExecutor, 1)[0] > 1.2


def test_steps_at_rest_are_queued_on_an_asynchronous_device() -> None:
    clock = Clock()

    class TimedExecutor(FakePipelinedExecutor):
        def submit(self, *step: Any) -> FakeStep:
            clock.now += 0.5
            return super().submit(*step)

    executor = TimedExecutor(vocab_size=VOCAB, context_tokens=CONTEXT)
    drafter = TracedDrafter(TRACES["always wrong"](), [0] * MOST_TOKENS, clock, Costs(look=0.1))
    speculator = Speculator(drafter, vocab_size=VOCAB)
    with Engine(executor, speculator=speculator, clock=clock) as engine:
        engine.generate([1, 2, 3], PARAMS)
        num_looks, num_steps = drafter.num_calls, engine.metrics().num_steps
    assert 5 < num_looks < 0.08 * num_steps
    assert executor.num_submitted >= num_steps - num_looks
