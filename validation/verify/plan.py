"""A plan says how engines are loaded and in which order requests run; a run of it observes what happened."""

from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import Literal

from ingot.runtime.asking.outputs import Completion
from ingot.runtime.options import EngineOptions
from ingot.runtime.steps.metrics import EngineMetrics
from ingot.validation.verify.failing_transfers import TransferFailures
from ingot.validation.verify.requests import Expected, VerifiedRequest

_SPARES = (2, 1, 3, 5, 8, 0, 12)
_TURNS = 6
_RARITIES = (1, 3, 7)
PoolKind = Literal["ample", "tight", "minimal"]


@dataclass(frozen=True)
class Plan:
    """The plain path, which features change: one request after another, each whole, nothing cached.

    options   of the engine; `kv_blocks` follows from `pool`
    pool      ample: all requests fit at once; tight: they do not; minimal: only the largest request fits
    slow      the pool has as many blocks, but half of the largest request's are fast, the others slow
    turn      requests that the order begins after, in a small pool
    spare     blocks of a tight pool beyond the minimal one
    together  all requests at once, instead of one after another
    warm      other requests with the same beginnings run first
    cancels   mates of the requests are cancelled before, while and after their prompts are computed
    choices   choices of each request
    constrained  requests with constraints run too
    adapters  requests with adapters run too
    evicts    other prompts then push all blocks out of the pool, and the requests run again
    fails     transfers are late, and some of them fail
    rarity    of the failures; see `TransferFailures`
    restarts  the requests ran in an engine before, which left its blocks in a folder on disk
    """

    options: EngineOptions = field(default_factory=lambda: EngineOptions(prefix_cache=False, kv_offload="off"))
    pool: PoolKind = "ample"
    slow: bool = False
    spare: int = 0
    turn: int = 0
    together: bool = False
    warm: bool = False
    cancels: bool = False
    choices: int = 1
    constrained: bool = False
    adapters: bool = False
    evicts: bool = False
    fails: bool = False
    rarity: int = 1
    restarts: bool = False

    def has(self, request: VerifiedRequest) -> bool:
        """Whether a request runs.

        One with a constraint or an adapter is for plans with these. A large one is for those with an ample pool, and
        not for small steps with others: its prompt would take the room of their drafts until they end.
        """
        in_small_steps = self.together and self.options.max_batch_tokens is not None
        if request.is_large and (self.pool != "ample" or in_small_steps):
            return False
        is_constrained = request.params.constraint is not None
        return (self.constrained or not is_constrained) and (self.adapters or request.adapter is None)

    @property
    def attempts(self) -> "tuple[Plan, ...]":
        """Plans to try in order until one exercises its features.

        Which pool makes requests collide depends on them, and how many transfers may fail depends on the model.
        """
        plans: list[Plan] = [self]
        if self.pool == "tight":
            plans = [replace(self, spare=spare, turn=turn) for turn in range(_TURNS) for spare in _SPARES]
        elif self.pool == "minimal" and self.together:
            plans = [replace(self, turn=turn) for turn in range(_TURNS)]
        elif self.fails:
            plans = [self] * len(_RARITIES)
        rarities = cycle(_RARITIES if self.fails else (self.rarity,))
        return tuple(replace(plan, rarity=rarity) for plan, rarity in zip(plans, rarities, strict=False))


@dataclass(frozen=True)
class VerifiedAnswer:
    """Answer of a run to a request, and that of the plain path."""

    expected: Expected
    completion: Completion


@dataclass
class Observed:
    """Record of a run: the answers, and the figures that show which features took part.

    asked         names of the requests and choices of the run itself
    answers       to these
    before        answers to what ran before to fill the cache
    apart         answers to requests that must find nothing in the cache, though their blocks are there
    cancelled     answers to cancelled mates: the beginnings of what the plain path answered
    block_tokens  of the engine
    failures      transfers that were made to fail
    slow_blocks   most blocks of the pool's slow part that requests used after a step
    shared_steps  steps that gave tokens to two requests or more
    before_run, after_run   the engine's own figures before and after the run itself
    """

    max_batch_tokens: int
    block_tokens: int = 0
    asked: list[str] = field(default_factory=list)
    answers: list[VerifiedAnswer] = field(default_factory=list)
    before: list[VerifiedAnswer] = field(default_factory=list)
    apart: list[VerifiedAnswer] = field(default_factory=list)
    cancelled: list[VerifiedAnswer] = field(default_factory=list)
    failures: TransferFailures = field(default_factory=TransferFailures)
    slow_blocks: int = 0
    shared_steps: int = 0
    before_run: EngineMetrics | None = None
    after_run: EngineMetrics | None = None

    def counted(self, name: str) -> int:
        """Return the growth of one of the engine's counters in the run itself."""
        if self.before_run is None or self.after_run is None:
            return 0
        grown: int = getattr(self.after_run, name) - getattr(self.before_run, name)
        return grown
