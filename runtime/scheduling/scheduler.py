"""The scheduler: chooses the sequences and tokens of the next step. Ints and dataclasses; no tensors, no clock.

A step has at most `max_batch_tokens` tokens:

    1. yield     a running sequence makes room for a waiting one of a more urgent level that was refused before
    2. decode    one token for every running sequence that has all others in the pool, by rank
    3. prefill   the next chunk of prompts that are being computed, by rank
    4. admit     waiting sequences in the order of the waiting queue, as long as tokens, sequences and blocks are left
    5. drafts    guesses to verify for sequences that decode, with what is left (`add_drafts`)

Running sequences are ranked by level, then by the order in which they were first admitted; `waiting` describes levels
and the order of admission. With one priority and one group all of it is first come, first served.

An admitted sequence has blocks for all its known tokens, so only decoding can run out of blocks. Then the running
sequence with the last rank is preempted, which is the newest of the least urgent level: its blocks are freed, and it
waits, first in its level, to compute its tokens again. The running sequence with the first rank always advances and is
never preempted but for a more urgent one.

A sequence yields to waiting ones with a lower priority number alone. When it resumes, its level is more urgent by 1,
by 2 more the second time, by 4 the third, but not beyond the level that it yielded to. So it yields at most about
log2(difference of priorities) times, and short urgent requests cannot keep a long one from ending. Since levels also
age, no sequence starves.

Scheduling needs positions only, so the newest token of a sequence may still be in flight (`step_pipeline`). Blocks are
freed and reused at once, even if a step in flight writes to them: the executor runs steps and copies in order, so
whatever it still writes there is overwritten before it is read.

A pool may have a slow part (`kv.blocks`). One sequence alone may fill both parts. Several share as many blocks as the
fast part has, unless `slow_blocks` finds that one more makes more tokens a second from the slow part than by waiting.

With tiers, an admitted sequence whose prefix is stored there is LOADING while it is restored: it has its blocks, and
steps go on without it. A preempted one finds its own blocks on the device, in a tier, or computes them again.
"""

from collections import Counter

from ingot.errors import RequestError
from ingot.runtime.kv.blocks import Admission, BlockCopy, BlockManager, BlockMove, Copy
from ingot.runtime.kv.keys import PrefixScope
from ingot.runtime.kv.states import StateCopy
from ingot.runtime.kv.tiers import TierManager
from ingot.runtime.kv.transfers.restored_prefix import CachedTokens
from ingot.runtime.scheduling.adapter_slots import AdapterSlots
from ingot.runtime.scheduling.prefix_restores import PrefixLoads
from ingot.runtime.scheduling.sequence import ScheduledBatch, ScheduledSequence, Sequence, SequenceState
from ingot.runtime.scheduling.slow_blocks import SlowBlocks
from ingot.runtime.scheduling.waiting import WaitingQueue, by_rank
from ingot.runtime.scheduling_policy import SchedulingPolicy

_AGING_POOLS = 16  # one level of aging is the work of filling the KV pool this often
_WATERMARK = 0.01  # share of the pool that admission leaves to running sequences, besides a block for each


class Scheduler:
    """Most urgent first, then fair to groups, then first come, under a budget of tokens, sequences and blocks.

    With static and dynamic batching (`scheduling_policy`), sequences are admitted in batches: the first step after a
    batch has ended opens the next, and it is closed once no more fit or wait. Nothing yields then.

    num_groups   steps that are computed at once, of different sequences: those that decode are divided among so many
                 steps, and a token in flight is read before its sequence is in a step again
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_batch_tokens: int,
        max_sequences: int,
        policy: SchedulingPolicy | None = None,
        tiers: TierManager | None = None,
        adapters: AdapterSlots | None = None,
        slow: SlowBlocks | None = None,
        num_groups: int = 1,
    ) -> None:
        assert max_batch_tokens > 0
        assert max_sequences > 0
        self._num_groups = num_groups
        self.blocks = blocks
        self._tiers = tiers
        self._loads = PrefixLoads(blocks, tiers) if tiers else None
        self._adapters = adapters
        self._slow, self._num_slow = slow, blocks.num_slow
        self.max_batch_tokens = max_batch_tokens
        self.max_sequences = max_sequences
        self.num_preemptions = 0
        self.num_swaps = 0  # resumed with blocks from a tier
        self.num_prefix_query_tokens = 0
        self.prefix_hit_tokens = Counter(CachedTokens()._asdict())  # by tier
        self.num_yields = 0
        self.num_batch_full = self.num_pool_full = 0  # steps before which sequences waited for a place, or for blocks
        self.policy = policy or SchedulingPolicy()
        self._is_continuous = self.policy.is_continuous
        pool_tokens = blocks.num_fast * blocks.block_tokens
        self.waiting = WaitingQueue(self.policy.priority_aging_tokens or _AGING_POOLS * pool_tokens)
        self.running: dict[int, Sequence] = {}
        self._num_in_scope: Counter[PrefixScope] = Counter()  # unfinished sequences of each private scope
        self._is_batch_open = True
        self._refused: tuple[int, int] | None = None  # sequence last refused blocks, and the headroom then

    @property
    def has_sequences(self) -> bool:
        """Whether any sequence runs or waits."""
        return bool(self.running or self.waiting)

    @property
    def _has_tokens_in_flight(self) -> bool:
        return any(each.num_in_flight for each in self.running.values())

    @property
    def has_ended_loads(self) -> bool:
        """Whether prefixes have arrived whose sequences the next step takes: a load may end while one is scheduled."""
        return any(each.load and each.load.done for each in self.running.values())

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; RequestError when the whole pool could not hold it."""
        needed = self.blocks.blocks_for(sequence.max_stored_tokens)
        if needed > self.blocks.num_blocks:
            raise RequestError(
                f"the request may grow to {sequence.max_total_tokens} tokens, which takes {needed} KV blocks of"
                f" {self.blocks.block_tokens} tokens; the pool has {self.blocks.num_blocks}."
                " Lower max_tokens, shorten the prompt, or give the engine more kv_blocks"
            )
        self._enter_scope(sequence)
        self.waiting.add(sequence)

    @property
    def slow_read_seconds(self) -> float:
        """Estimated seconds that steps took to read the slow part of the pool."""
        return self._slow.read_seconds if self._slow else 0.0

    def schedule(self) -> ScheduledBatch:
        """Choose the next step. It is empty only when nothing is unfinished, or all that is waits for transfers."""
        batch = ScheduledBatch()
        if self._num_slow:
            self.blocks.begin_step()
        if self._loads:
            self._end_loads(self._loads, batch)
        if self._is_continuous and self.waiting.num_sequences:
            self._yield(batch)
        num_yielded = len(batch.preempted)
        longer = self._decode(batch)
        if longer:
            self._prefill(batch, longer)
        opens_batch = self._is_continuous or self._is_batch_open or not self.running
        if opens_batch and len(batch.preempted) == num_yielded:
            if self.waiting.num_sequences:
                self._admit(batch)
            self._is_batch_open = batch.num_tokens == self.max_batch_tokens  # the rest of its prompts may still join
        if not batch.entries and not (self._num_groups > 1 and self._has_tokens_in_flight):
            self._park_idle(batch)
        if self._slow:
            batch.copies.extend(self._slow.move(self.running.values()))
        for sequence, start, num_tokens, *_ in batch.entries:
            self.waiting.serve(sequence, start, num_tokens)
        if self._loads and self.waiting.num_sequences:
            self._loads.read_ahead(self.waiting)
        return batch

    def fork(self, parent: Sequence, children: list[Sequence]) -> list[Copy]:
        """Start sequences that begin with all tokens of another, which are computed. They rank after it, in order.

        Forking allocates no block, but as in `_start` each running sequence must have one to grow into. One that waits,
        now or later, finds the other's full blocks in the prefix index. Returns the copies to make before another step.
        """
        room = 0
        if parent.state is SequenceState.RUNNING:
            assert parent.num_computed == len(parent.tokens)
            room = min(self.max_sequences, self.blocks.num_available - self._num_slow) - len(self.running)
            if self.blocks.states:
                room = min(room, self.blocks.states.num_available)
        copies: list[Copy] = []
        for number, child in enumerate(children):
            child.follow(parent)
            self._enter_scope(child)
            if number < room:
                copies += self.blocks.fork(parent.id, child.id)
                child.num_computed = parent.num_computed
                child.state = SequenceState.RUNNING
                self._enter_running(child)
            else:
                child.state = SequenceState.WAITING
                self.waiting.put_back(child)
        return copies

    def resume(self, sequence: Sequence) -> None:
        """Record that a sequence without tokens to compute has its next one; a parked one waits for blocks."""
        if sequence.state is SequenceState.PARKED:
            sequence.state = SequenceState.WAITING
            self.waiting.put_back(sequence)

    def add_drafts(self, batch: ScheduledBatch, index: int, drafts: tuple[int, ...]) -> None:
        """Let the step verify as many leading drafts for an entry that decodes as tokens and blocks are left for.

        Drafts come last: call this once all else is scheduled. They preempt nothing, and leave each running sequence a
        block to grow into.
        """
        entry = batch.entries[index]
        sequence, end = entry.sequence, entry.start + entry.num_tokens
        most = min(self.max_batch_tokens - batch.num_tokens, sequence.max_stored_tokens - end)
        if self.blocks.states:
            most = self.blocks.states.num_drafts(entry.start, most) if self.blocks.states.num_available else 0
        held = len(self.blocks.table(sequence.id)) * self.blocks.block_tokens - end
        for count in {min(len(drafts), most): None, min(len(drafts), most, held): None}:
            if count <= 0:
                return
            copies = self.blocks.reserve(
                sequence.id, end, end + count, spare_blocks=len(self.running) + self._withheld, tiers=self._tiers
            )
            if copies is not None:
                batch.entries[index] = entry._replace(drafts=drafts[:count])
                batch.copies.extend(copies)
                batch.copies.extend(self.blocks.checkpoint(sequence.id))
                batch.num_tokens += count
                return

    def accept(self, sequence: Sequence) -> None:
        """Record that the newest token of a sequence is the one that was drafted: it is in the pool already."""
        self.waiting.serve(sequence, sequence.num_computed, 1)
        sequence.num_computed += 1

    def drop_rejected(self, entry: ScheduledSequence) -> tuple[StateCopy, ...]:
        """Free the blocks that hold rejected drafts alone. Others are overwritten by the tokens that come.

        Side state cannot drop a draft: where one was rejected, it returns to what it was before the step, by the copy
        that this returns, and the next step computes the accepted tokens again.
        """
        sequence, states = entry.sequence, self.blocks.states
        if sequence.state is not SequenceState.RUNNING:
            return ()
        if states is None:
            self.blocks.shrink(sequence.id, sequence.num_computed)
            return ()
        if sequence.num_computed == entry.start + entry.num_rows:
            states.drop_checkpoint(sequence.id)
            return ()
        self.blocks.shrink(sequence.id, len(sequence.tokens))
        sequence.num_computed = entry.start
        return (states.restore(sequence.id),)

    def complete(self, batch: ScheduledBatch) -> None:
        """Record that the step was computed: its tokens are in the pool now. Drafts count once they are accepted."""
        for sequence, start, num_tokens, *_ in batch.entries:
            sequence.num_computed = start + num_tokens

    def queue(self, batch: ScheduledBatch) -> None:
        """Record that the step was queued on the device: the next one continues where it will end."""
        for sequence, start, num_tokens, samples, *_ in batch.entries:
            sequence.num_computed = start + num_tokens
            sequence.num_in_flight += samples

    def retire(self, batch: ScheduledBatch) -> None:
        """Record that a queued step was computed, before the tokens that it sampled are added to their sequences."""
        for sequence, _, _, samples, *_ in batch.entries:
            sequence.num_in_flight -= samples

    def undo(self, batch: ScheduledBatch) -> None:
        """Record that a queued step failed: its sequences continue where it began. Undo the newest step first."""
        for sequence, start, _, samples, *_ in batch.entries:
            sequence.num_in_flight -= samples
            if sequence.state is SequenceState.RUNNING:
                sequence.num_computed = start
                if self.blocks.states:
                    self.blocks.states.rollback(sequence.id, start)

    def restart(self, batch: ScheduledBatch, *, kept: ScheduledBatch) -> None:
        """Let sequences of an undone step wait, unless `kept` has them too: their side state is not what it was."""
        others = {entry.sequence.id for entry in kept.entries}
        for entry in reversed(batch.entries):
            if entry.sequence.state is SequenceState.RUNNING and entry.sequence.id not in others:
                self._preempt(entry.sequence, batch)

    def share(self, entry: ScheduledSequence, num_accepted: int = 0) -> None:
        """Add the full blocks of a sequence to the prefix index, before the token sampled from `entry` is added to it.

        `num_accepted` of the entry's drafts were accepted so far: the logits came after the last of them.

        Only finite logits show that keys and values are, so the blocks of a prompt enter the index when its first token
        is sampled, and no request depends on a block that turns out to be damaged. A sequence that has ended or been
        preempted since has no blocks any more.
        """
        if entry.sequence.state is SequenceState.RUNNING:
            num_computed = entry.start + entry.num_tokens + num_accepted
            self.blocks.commit(entry.sequence.id, entry.sequence.tokens, num_computed)

    def discard(self, sequence: Sequence) -> None:
        """Remove a sequence whose keys and values are damaged, and cached blocks that may have damaged them."""
        self.remove(sequence)
        self._forget(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a finished or aborted sequence and free its blocks."""
        if sequence.id in self.running:
            self._release(sequence)
        elif sequence.state is SequenceState.WAITING:
            self.waiting.remove(sequence)
        if sequence.state not in (SequenceState.UNFORKED, SequenceState.FINISHED):
            self._leave_scope(sequence)
        sequence.state = SequenceState.FINISHED

    def _enter_scope(self, sequence: Sequence) -> None:
        if sequence.scope.private:
            self._num_in_scope[sequence.scope] += 1

    def _leave_scope(self, sequence: Sequence) -> None:
        """Drop the cached blocks of a private scope: the prompt's with its last sequence, a sequence's own with it."""
        if not sequence.scope.private:
            return
        self._num_in_scope[sequence.scope] -= 1
        is_last = not self._num_in_scope[sequence.scope]
        if is_last:
            del self._num_in_scope[sequence.scope]
        if is_last or sequence.num_prompt_tokens < self.blocks.block_tokens:  # then it shares no full block
            self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        self.blocks.forget(sequence.tokens, sequence.scope)
        if self._tiers:
            self._tiers.forget()

    def _decode(self, batch: ScheduledBatch) -> list[Sequence]:
        """Add a token of each sequence that has all others in the pool; return those that have more to compute."""
        longer: list[Sequence] = []
        most = -(-len(self.running) // self._num_groups)
        for sequence in sorted(self.running.values(), key=by_rank):
            if batch.num_tokens == self.max_batch_tokens:
                break
            num_pending = sequence.num_pending
            if self._num_groups > 1 and num_pending == 1 and (sequence.num_in_flight or batch.num_tokens >= most):
                continue
            if num_pending > 1:
                longer.append(sequence)
            start = sequence.num_computed
            is_full = start + 1 >= sequence.max_total_tokens  # it ends when its last token is read
            if num_pending != 1 or is_full or sequence.state is not SequenceState.RUNNING:
                continue
            copies = self.blocks.reserve(
                sequence.id, start, start + 1, spare_blocks=self._num_slow and self._withheld, tiers=self._tiers
            )
            if copies is None:
                copies = self._reserve_by_preempting(sequence, batch)
            if copies is not None:
                batch.add(sequence, 1, copies)
        return longer

    def _prefill(self, batch: ScheduledBatch, longer: list[Sequence]) -> None:
        for sequence in longer:
            if batch.num_tokens == self.max_batch_tokens:
                return
            if sequence.state is SequenceState.RUNNING:  # it was not preempted since
                batch.add(sequence, self._chunk_tokens(sequence, batch))

    def _admit(self, batch: ScheduledBatch) -> None:
        while len(self.running) < self.max_sequences and batch.num_tokens < self.max_batch_tokens:
            sequence = self.waiting.first()
            if sequence is None or sequence in batch.preempted or sequence.num_in_flight:
                return
            copies = self._start(sequence)
            if copies is None:
                self.num_pool_full += not self._waits_for_adapter(sequence)
                return
            if sequence.state is SequenceState.LOADING:
                batch.copies.extend(copies)
            else:
                batch.add(sequence, self._chunk_tokens(sequence, batch), copies)
        self.num_batch_full += len(self.running) == self.max_sequences and bool(self.waiting)

    def _chunk_tokens(self, sequence: Sequence, batch: ScheduledBatch) -> int:
        """Tokens of a sequence that the step has room for; fewer, to end where side state is to be kept."""
        most = min(sequence.num_pending, self.max_batch_tokens - batch.num_tokens)
        if self.blocks.states is None:
            return most
        start = sequence.num_computed
        return self.blocks.states.chunk_end(start, start + most, sequence.num_prompt_tokens) - start

    def _start(self, sequence: Sequence) -> tuple[Copy, ...] | None:
        """Allocate blocks for the first waiting sequence, leaving each running one a block to grow into."""
        if self._is_refused(sequence):
            return None  # do not hash the prompt again at every step
        admission = self.blocks.admit(
            sequence.id,
            sequence.tokens,
            scope=sequence.scope,
            spare_blocks=self._spare_blocks(sequence),
            reuse_prefix=sequence.reuse_prefix,
            tiers=self._tiers,
            may_restore=PrefixLoads.are_allowed(sequence),
        )
        self._refused = None if admission else (sequence.id, self._headroom(sequence))
        if admission is None:
            return None
        assert not sequence.num_in_flight, "a sequence was preempted and admitted during one step"
        self.waiting.take(sequence)
        self._enter_running(sequence)
        sequence.num_computed = admission.cached_tokens
        self.num_prefix_query_tokens += len(sequence.tokens) if sequence.reuse_prefix else 0
        if not self._begin_load(sequence, admission):
            self._run(sequence, CachedTokens(admission.cached_tokens))
        return admission.copies

    def _headroom(self, sequence: Sequence) -> int:
        """Blocks that the admission of a sequence may take."""
        return self.blocks.num_available - self._spare_blocks(sequence)

    def _spare_blocks(self, sequence: Sequence) -> int:
        """Blocks that an admission leaves: one for each running sequence to grow into, a share of the pool, and as
        many as the slow part has, unless running from there pays.
        """
        if not self.running:
            return 0
        spare = len(self.running) + int(self.blocks.num_fast * _WATERMARK)
        if self._slow:
            needed = spare + self.blocks.blocks_for(len(sequence.tokens))
            if self._slow.pays(sequence, needed, self.running.values()):
                return spare
        return spare + self._num_slow

    def _is_refused(self, sequence: Sequence) -> bool:
        """Whether the pool refused blocks to a sequence, and none was freed since; or it has to wait for a slot."""
        if self._waits_for_adapter(sequence):
            return True
        if self._lacks_state_slot:
            return True
        return (
            self._refused is not None
            and self._refused[0] == sequence.id
            and self._headroom(sequence) <= self._refused[1]
        )

    @property
    def _lacks_state_slot(self) -> bool:
        """Return whether no slot for side state is left, after unpinning what can be if need be."""
        states = self.blocks.states
        if states is None or states.num_available:
            return False
        if states.num_pinned and self._tiers:
            self._tiers.relieve()
        return not states.num_available

    def _yield(self, batch: ScheduledBatch) -> None:
        """Preempt the last running sequence for a waiting one that is more urgent and was refused, if that can help."""
        first = self.waiting.first()
        if first is None or self._waits_for_adapter(first):  # slots are freed by sequences that end
            return
        if not (len(self.running) == self.max_sequences or self._is_refused(first)):
            return
        level = self.waiting.first_level
        less_urgent = [each for each in self.running.values() if each.level > level and each.priority > first.priority]
        if less_urgent and self._suffices(less_urgent, first):
            last = max(less_urgent, key=by_rank)
            last.resume_level = max(level, last.level - 2**last.num_yields)
            last.num_yields += 1
            self.num_yields += 1
            self._preempt(last, batch)

    def _suffices(self, less_urgent: list[Sequence], sequence: Sequence) -> bool:
        """Whether a sequence could be admitted without others, leaving aside that it may have a cached prefix."""
        blocks = sum(len(self.blocks.table(each.id)) for each in less_urgent)
        return self.blocks.blocks_for(len(sequence.tokens)) <= self._headroom(sequence) + len(less_urgent) + blocks

    def _begin_load(self, sequence: Sequence, admission: Admission) -> bool:
        return self._loads is not None and sequence.reuse_prefix and self._loads.begin(sequence, admission)

    def _end_loads(self, loads: PrefixLoads, batch: ScheduledBatch) -> None:
        """Let sequences run whose load is done, or wait if they must start over."""
        for sequence in [each for each in self.running.values() if each.load and each.load.done]:
            ended = loads.end(sequence)
            if ended is None:
                self._release(sequence)
                self._put_back(sequence)
                continue
            cached, copies = ended
            batch.copies.extend(copies)
            sequence.num_computed = cached.total
            self._run(sequence, cached)

    def _run(self, sequence: Sequence, cached: CachedTokens) -> None:
        """Let a sequence compute what is not cached."""
        sequence.state = SequenceState.RUNNING
        if sequence.cached_tokens is None:
            sequence.cached_tokens = cached
        self.num_swaps += sequence.num_preemptions > 0 and cached.host + cached.disk > 0
        if any(cached):
            self.prefix_hit_tokens.update(cached._asdict())

    def _park_idle(self, batch: ScheduledBatch) -> None:
        """Preempt sequences that wait for others of their group to be computed, the last first, until one can start."""
        idle = [each for each in self.running.values() if not each.num_pending]
        for sequence in sorted(idle, key=by_rank, reverse=True):
            if batch.entries or any(each.state is SequenceState.LOADING for each in self.running.values()):
                return
            self._preempt(sequence, batch)
            self._admit(batch)

    def _reserve_by_preempting(
        self, sequence: Sequence, batch: ScheduledBatch
    ) -> tuple[BlockCopy | BlockMove, ...] | None:
        """Blocks for one more token, preempting the last sequences; None when that preempts this sequence itself.

        Where running the last one from the slow part pays, it runs on, as long as that has blocks.
        """
        start = sequence.num_computed
        copies = None
        while copies is None:
            last = max(self.running.values(), key=by_rank)
            if last is sequence:  # one that waits for it, in its group or another, can do without its blocks
                last = max((each for each in self.running.values() if not each.num_pending), key=by_rank, default=last)
            if self._slow and self._slow.pays(last, len(self.blocks.table(last.id)), self.running.values()):
                copies = self.blocks.reserve(sequence.id, start, start + 1, tiers=self._tiers)
                if copies is not None:
                    return copies
            self._preempt(last, batch)
            if last is sequence:
                return None
            copies = self.blocks.reserve(sequence.id, start, start + 1, spare_blocks=self._withheld, tiers=self._tiers)
        return copies

    @property
    def _withheld(self) -> int:
        """Blocks that sequences leave before anything is weighed: as many as the slow part has, unless one alone runs.

        So what the fast part could hold never fills more than that; in which part its blocks are is another matter.
        """
        return self._num_slow if len(self.running) > 1 else 0

    def _waits_for_adapter(self, sequence: Sequence) -> bool:
        """Whether running sequences use all slots, with other adapters."""
        return bool(self._adapters and sequence.adapter and not self._adapters.has_room(sequence.adapter))

    def _enter_running(self, sequence: Sequence) -> None:
        self.running[sequence.id] = sequence
        if self._adapters and sequence.adapter:
            self._adapters.take(sequence.adapter)

    def _release(self, sequence: Sequence) -> None:
        """Take a sequence from the running ones and free its blocks."""
        del self.running[sequence.id]
        if self._adapters and sequence.adapter:
            self._adapters.release(sequence.adapter)
        if self._loads:
            self._loads.cancel(sequence)
        self.blocks.release(sequence.id)

    def _preempt(self, sequence: Sequence, batch: ScheduledBatch) -> None:
        self._release(sequence)
        self._put_back(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        batch.preempted.append(sequence)

    def _put_back(self, sequence: Sequence) -> None:
        """Let a sequence without blocks wait, or park it if it has no token to compute."""
        if sequence.num_pending:
            sequence.state = SequenceState.WAITING
            self.waiting.put_back(sequence)
        else:
            sequence.state = SequenceState.PARKED
        sequence.num_computed = 0
