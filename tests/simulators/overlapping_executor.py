"""The fake executor with stages: several steps are in flight, and computed as late as possible.

A step is computed when it or a later one is read, or when the engine settles. Arrays are copied when a step begins. In
addition to what the fake executor refuses, it refuses more steps than there are stages. A step with a token that is not
read yet, and a copy that does not wait for the steps in flight, change the tokens.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any

from ingot.runtime.adapters import Adapter
from ingot.runtime.executors import StageFacts
from ingot.runtime.forward_batch import FloatArray, ForwardBatch
from tests.simulators.fake_executor import FakeExecutor, require
from tests.simulators.pipelined_executor import copied


class FakeOverlappingExecutor(FakeExecutor):
    """Logits and options are those of FakeExecutor; `num_at_once` stages."""

    num_at_once, stages = 3, StageFacts(3)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._begun: deque[FakeBegunStep] = deque()
        self.num_begun = self.most_in_flight = 0

    def begin(self, batch: ForwardBatch) -> "FakeBegunStep":
        """Begin a step. EngineError for one that violates the contract of `OverlappingExecutor`."""
        self.require_open()
        self.check(batch)
        require(len(self._begun) < self.num_at_once, "more steps are in flight than there are stages")
        step = FakeBegunStep(self, copied(batch))
        self._begun.append(step)
        self.num_begun += 1
        self.most_in_flight = max(self.most_in_flight, len(self._begun))
        return step

    def settle(self) -> None:
        """Compute the steps in flight."""
        while self._begun:
            self._begun.popleft().compute()

    def forward(self, batch: ForwardBatch) -> FloatArray:
        """As FakeExecutor's, after the steps in flight."""
        self.settle()
        return super().forward(batch)

    def copy_block(self, source: int, target: int) -> None:
        """Copy a block after the steps in flight."""
        self.settle()
        super().copy_block(source, target)

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        """Load an adapter after the steps in flight."""
        self.settle()
        super().load_adapter(slot, adapter)

    def compute(self, step: "FakeBegunStep") -> None:
        """Compute the steps up to and including one."""
        while not step.computed:
            self._begun.popleft().compute()


@dataclass(eq=False)
class FakeBegunStep:
    """A step in flight."""

    executor: FakeOverlappingExecutor
    batch: ForwardBatch
    found: FloatArray | None = None
    error: Exception | None = None

    @property
    def computed(self) -> bool:
        """Report whether all stages have computed it."""
        return self.found is not None or self.error is not None

    def logits(self) -> FloatArray:
        """Compute everything up to this step; logits [R, vocab]."""
        self.executor.compute(self)
        if self.error:
            raise self.error
        assert self.found is not None
        return self.found

    def compute(self) -> None:
        """The work of the stages. `logits` raises its error."""
        try:
            self.found = self.executor.logits(self.batch).copy()
        except Exception as error:  # noqa: BLE001 (its reader gets it)
            self.error = error
