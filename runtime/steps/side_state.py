"""Side state in the steps of an engine: snapshots after a step, and replay after one that failed.

A failed step may have changed the state of its sequences, which cannot be undone as positions can. So a sequence is
computed again from its first token before the failed step is repeated for it alone. Failures are rare, and this costs
no second copy of the state.
"""

import logging
from collections.abc import Iterator

from ingot.errors import EngineError
from ingot.runtime.executors import Executor, StatefulExecutor
from ingot.runtime.kv.states import StateCopy, StateManager
from ingot.runtime.scheduling.sequence import ScheduledBatch, ScheduledSequence, SequenceState

_log = logging.getLogger(__name__)


def state_manager(executor: Executor) -> StateManager | None:
    """Slots for the side state of the executor's model; None if it has none. EngineError when it cannot keep any."""
    kv = executor.kv_geometry
    if not kv.state_bytes:
        return None
    if not isinstance(executor, StatefulExecutor):
        raise EngineError(
            f"the model has {kv.state_bytes} bytes of side state for each sequence, which its engine cannot keep;"
            " build it for a target that supports it"
        )
    if executor.num_states < 1:
        raise EngineError(f"the engine has {executor.num_states} state slots; a sequence of this model needs one")
    return StateManager(executor.num_states, kv.block_tokens)


class SideState:
    """Makes the copies of one executor's states."""

    def __init__(self, executor: StatefulExecutor, states: StateManager) -> None:
        self._executor = executor
        self._states = states

    def copy(self, copy: StateCopy) -> None:
        """Copy a state before a step."""
        self._executor.copy_state(copy.source, copy.target)

    def keep(self, batch: ScheduledBatch) -> None:
        """Make the snapshots that are due after a step was computed or queued. One that fails is left out."""
        for sequence, start, num_tokens, _, drafts, _ in batch.entries:
            if sequence.state is not SequenceState.RUNNING or drafts:  # a draft may be rejected
                continue
            end = start + num_tokens
            copy = self._states.snapshot(sequence.id, end, sequence.num_prompt_tokens)
            try:
                if copy:
                    self._executor.copy_state(copy.source, copy.target)
            except Exception as error:  # noqa: BLE001 (a snapshot saves time only; nothing depends on it)
                _log.warning("the state after %d tokens of a sequence was not kept: %s", end, error)
                self._states.rollback(sequence.id, end - 1)

    def replay(self, entry: ScheduledSequence, max_batch_tokens: int) -> Iterator[ScheduledBatch]:
        """Steps that compute a sequence again up to where an entry starts; they sample nothing."""
        self._states.drop_checkpoint(entry.sequence.id)  # the entry is computed without its drafts
        for start in range(0, entry.start, max_batch_tokens):
            count = min(max_batch_tokens, entry.start - start)
            yield ScheduledBatch([ScheduledSequence(entry.sequence, start, count, samples=False)], num_tokens=count)
