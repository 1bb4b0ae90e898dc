"""The waiting queue: chooses the sequence that is admitted next. It has no clock; the order of calls decides alone.

    1. level      the most urgent level first: that of a new sequence is its priority, lower numbers first
    2. resumed    in a level, sequences that were preempted, in the order in which they were first admitted
    3. group      then the group that was served least (users, tenants), by virtual token counters
    4. arrival    in a group, in order of arrival

**Groups.** Each group has a counter of the tokens that it was served, where a generated token counts twice, and the
group with the lowest is next. A group that comes back after it had nothing to wait for starts at no less than the
lowest counter of those that wait, so idle time earns no credit. A group with a thousand requests therefore delays one
with a single request by about one turn (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024,
algorithm 2).

**Aging.** While sequences of more urgent levels are served, a level that waits ages: every `aging_tokens` tokens make
it one level more urgent, until it is level with those that overtake it; there, the level that aged goes first. An
admission returns the level to where it began, and the admitted sequence keeps the level that it had reached. So every
level is served, however many urgent requests arrive, and in it every group, and in that every sequence.
"""

from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Iterator
from operator import attrgetter

from ingot.runtime.scheduling.sequence import Sequence

by_rank = attrgetter("rank")
_GENERATED_WEIGHT = 2  # of a generated token, where one of the prompt counts 1: the paper's choice
_MAX_IDLE_GROUPS = 4096  # whose counters are kept: names of groups come from outside


class _Level:
    """Waiting sequences of one level, and the level that they have reached by aging."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.reached = number
        self.num_prompt_tokens = 0
        self.aged_tokens = 0
        self.resumed: list[Sequence] = []  # ascending rank
        self.groups: dict[str, deque[Sequence]] = {}

    def __bool__(self) -> bool:
        return bool(self.resumed or self.groups)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.resumed
        for group in self.groups.values():
            yield from group

    def age(self, served_level: int, num_tokens: int, aging_tokens: int) -> None:
        """Record that a sequence of another level was served while this one waits."""
        if served_level < self.reached:
            steps, self.aged_tokens = divmod(self.aged_tokens + num_tokens, aging_tokens)
            self.reached = max(self.reached - steps, served_level)

    def restart(self) -> None:
        """Record that one of its sequences was admitted."""
        self.reached, self.aged_tokens = self.number, 0

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence; ValueError when it is not here."""
        if sequence.place:
            self.resumed.remove(sequence)
            return
        group = self.groups[sequence.group]
        group.remove(sequence)
        if not group:
            del self.groups[sequence.group]


class WaitingQueue:
    """Sequences that wait, in the order that the module describes. Iterates by level, resumed first, then by group."""

    def __init__(self, aging_tokens: int) -> None:
        assert aging_tokens > 0
        self._aging_tokens = aging_tokens
        self._levels: dict[int, _Level] = {}
        self._num_waiting: dict[str, int] = {}  # by group, of new sequences
        self._served: OrderedDict[str, int] = OrderedDict()  # virtual counter of each group
        self._last_to_leave: str | None = None  # the group that left the queue last
        self._num_places = 0
        self.num_sequences = 0
        self.num_prompt_tokens = 0  # of all that wait
        self.num_admitted_tokens = 0  # of all prompts that no longer wait, without those that came back

    def __len__(self) -> int:
        return self.num_sequences

    def __iter__(self) -> Iterator[Sequence]:
        for level in sorted(self._levels):
            yield from self._levels[level]

    def add(self, sequence: Sequence) -> None:
        """Add a new sequence."""
        level = self._level(sequence.level)
        if sequence.group not in self._num_waiting:
            self._lift(sequence.group)
        level.groups.setdefault(sequence.group, deque()).append(sequence)
        self._num_waiting[sequence.group] = self._num_waiting.get(sequence.group, 0) + 1
        self._count(level, sequence, 1)

    def put_back(self, sequence: Sequence) -> None:
        """Add a sequence that was preempted: it is the first of its level, after those that were admitted before it."""
        level = self._level(sequence.level)
        insort(level.resumed, sequence, key=by_rank)
        self._count(level, sequence, 1)

    def first(self) -> Sequence | None:
        """The sequence to admit next; None when none waits."""
        return self._first_of(self._next_level()) if self._levels else None

    @property
    def first_level(self) -> int:
        """Level that the first sequence has reached, which it keeps when it is admitted."""
        return self._next_level().reached

    def take(self, sequence: Sequence) -> None:
        """Remove the first sequence, which is admitted, and give it its rank among running ones."""
        level = self._next_level()
        assert sequence is self._first_of(level), "another sequence is first"
        level.remove(sequence)
        if not sequence.place:
            self._leave(sequence.group)
            self._num_places += 1
            self.num_admitted_tokens += sequence.num_prompt_tokens
        place = sequence.rank[1:] if sequence.place else (self._num_places,)
        sequence.rank = (min(level.reached, sequence.resume_level), *place)
        level.restart()
        self._drop_if_empty(level)
        self._count(level, sequence, -1)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that has ended; ValueError when it does not wait."""
        level = self._levels.get(sequence.level)
        if level is None:
            raise ValueError(f"sequence {sequence.id} does not wait")
        level.remove(sequence)
        if not sequence.place:
            self._leave(sequence.group)
        self._drop_if_empty(level)
        self._count(level, sequence, -1)

    def serve(self, sequence: Sequence, start: int, num_tokens: int) -> None:
        """Charge a step's tokens of a running sequence to its group, and age the levels that wait for it.

        A token is charged once, however often it is computed, and one from the prefix cache never.
        """
        end, begin, prompt_end = start + num_tokens, sequence.num_charged, sequence.num_prompt_tokens
        if begin < prompt_end:  # drafts that were accepted count too
            begin = max(begin, min(start, prompt_end))
        if end > begin:
            num_prompt = min(end, prompt_end) - begin if begin < prompt_end else 0
            charge = num_prompt + _GENERATED_WEIGHT * (end - begin - num_prompt)
            self._served[sequence.group] = self._served.get(sequence.group, 0) + charge
            sequence.num_charged = end
        for level in self._levels.values():
            level.age(sequence.level, num_tokens, self._aging_tokens)

    def tokens_before(self, priority: int) -> int:
        """Prompt tokens of the sequences that wait at this level or a more urgent one."""
        return sum(level.num_prompt_tokens for level in list(self._levels.values()) if level.number <= priority)

    def served(self, group: str) -> int:
        """The virtual counter of a group; 0 for one that is unknown."""
        return self._served.get(group, 0)

    def check(self) -> None:
        """Assert that counts equal the sequences that wait, and that nothing empty is kept."""
        waiting = list(self)
        assert len(waiting) == self.num_sequences
        assert sum(sequence.num_prompt_tokens for sequence in waiting) == self.num_prompt_tokens
        assert all(self._levels.values())
        levels = self._levels.values()
        assert all(level.num_prompt_tokens == sum(each.num_prompt_tokens for each in level) for level in levels)
        assert all(each.level == number for number, level in self._levels.items() for each in level)
        new = [sequence.group for sequence in waiting if not sequence.place]
        assert {group: new.count(group) for group in new} == self._num_waiting
        assert self._num_waiting.keys() <= self._served.keys()
        assert len(self._served) <= max(_MAX_IDLE_GROUPS + 1, len(self._num_waiting))

    def _level(self, number: int) -> _Level:
        return self._levels.get(number) or self._levels.setdefault(number, _Level(number))

    def _next_level(self) -> _Level:
        if len(self._levels) == 1:
            return next(iter(self._levels.values()))
        return min(self._levels.values(), key=lambda level: (level.reached, -level.number))

    def _first_of(self, level: _Level) -> Sequence:
        if level.resumed:
            return level.resumed[0]
        if len(level.groups) == 1:
            return next(iter(level.groups.values()))[0]
        return level.groups[min(level.groups, key=self.served)][0]

    def _lift(self, group: str) -> None:
        """Start the counter of a group that begins to wait."""
        others = self._num_waiting or ([self._last_to_leave] if self._last_to_leave is not None else [])
        least = min((self._served[other] for other in others if other in self._served), default=0)
        self._served[group] = max(self._served.pop(group, 0), least)  # at the end: it was used last
        idle = next((name for name in self._served if name not in self._num_waiting and name != group), None)
        if len(self._served) > _MAX_IDLE_GROUPS and idle is not None:
            del self._served[idle]

    def _leave(self, group: str) -> None:
        self._num_waiting[group] -= 1
        if not self._num_waiting[group]:
            del self._num_waiting[group]
            self._last_to_leave = group

    def _drop_if_empty(self, level: _Level) -> None:
        if not level:
            del self._levels[level.number]

    def _count(self, level: _Level, sequence: Sequence, sign: int) -> None:
        level.num_prompt_tokens += sign * sequence.num_prompt_tokens
        self.num_sequences += sign
        self.num_prompt_tokens += sign * sequence.num_prompt_tokens
