"""The faults: each replaces one function of the runtime by one that is wrong in the way of its class.

A fault is planted before the plain path runs, as an error in the source would be. `features` are those that the fault
breaks: a verification finds it when a pair with one of them differs. `pair` is one that does, for short runs.

A fault in handling trouble needs trouble: copies that fail, a disk whose bytes rot. `trouble` makes it, and
is there too when the same pair must pass without the fault.
"""

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from ingot.artifact.kv_geometry import KVGeometry, KVLayer
from ingot.runtime.constraints.matcher import Matcher
from ingot.runtime.engine import engine_core
from ingot.runtime.engine.engine import Engine
from ingot.runtime.engine.open_tiers import open_tiers
from ingot.runtime.forward_batch import FloatArray, ForwardBatch
from ingot.runtime.kv.blocks import Admission, BlockManager
from ingot.runtime.kv.disk import slot as disk_slot
from ingot.runtime.kv.disk import store as disk_store
from ingot.runtime.kv.keys import BlockContent
from ingot.runtime.kv.pool_tiers import PoolTiers
from ingot.runtime.kv.prefix_index import PrefixIndex
from ingot.runtime.kv.states import StateCopy, StateManager
from ingot.runtime.kv.tiers import TierManager
from ingot.runtime.kv.transfers.restored_prefix import LoadingBlock
from ingot.runtime.kv.transfers.restores import Restores
from ingot.runtime.kv.transfers.transfer import Bytes, Workers
from ingot.runtime.requests.request import Request
from ingot.runtime.scheduling.scheduler import Scheduler
from ingot.runtime.scheduling.sequence import ScheduledSequence
from ingot.runtime.scheduling.sequence import Sequence as EngineSequence
from ingot.runtime.steps.step_reader import StepReader
from ingot.validation.verify import Subject, scenario
from ingot.validation.verify.plan import Plan
from tests.simulators.fake_executor import FakeExecutor
from tests.simulators.layered_executor import LayeredExecutor

Plant = Callable[[type], AbstractContextManager[object]]
"""Plants a fault for the life of the context; gets the class of the executor."""


def no_trouble(_: type) -> AbstractContextManager[object]:
    """Nothing goes wrong but the fault."""
    return nullcontext()


@dataclass(frozen=True)
class Fault:
    """One planted fault of a class of the table in docs/verify.md."""

    number: int
    kind: str
    planted: str
    features: tuple[str, ...]
    pair: str
    plant: Plant
    layout: str = ""  # of the simulated model, for what not every model has
    trouble: Plant = no_trouble
    needs_model: bool = False  # texts of the simulated model repeat themselves too little to find it


def patched(owner: object, name: str, make: Callable[[Any], Any]) -> Plant:
    """Replace an attribute by what `make` returns for it."""
    return lambda _: patch.object(owner, name, make(getattr(owner, name)))


# Class 1: copies that are not ordered with steps


def _used_before_it_arrived(right: Callable[..., Any]) -> Callable[..., Any]:
    """A restored block counts as arrived as soon as its copy is queued."""

    def advance(self: Restores, pool: PoolTiers, block: LoadingBlock, **how: bool) -> bool | None:
        found: bool | None = right(self, pool, block, **how)
        return True if found is None and block.transfer else found

    return advance


# Class 2: found, not pinned


def _hits_not_held(right: Callable[..., Any]) -> Callable[..., Any]:
    """Cached blocks that a sequence was admitted with may be evicted, the oldest first."""

    def admit(self: BlockManager, sequence_id: int, *args: Any, **others: Any) -> Admission | None:
        found: Admission | None = right(self, sequence_id, *args, **others)
        if found:
            hits = self.table(sequence_id)[: found.cached_tokens // self.block_tokens]
            self._idle = OrderedDict.fromkeys([*hits, *self._idle])
        return found

    return admit


@contextmanager
def _no_pins(_: type) -> Iterator[None]:
    """Blocks of transfers in flight are not pinned: they are evicted and written to like all others."""

    def pin(self: BlockManager, block: int) -> None:
        pass

    with (
        patch.object(BlockManager, "pin", pin),
        patch.object(BlockManager, "unpin", pin),
        patch.object(TierManager, "check", lambda _: None),  # counts pins
    ):
        yield


# Class 3: the key forgets something


class _Stranger(FakeExecutor):
    """Another model of the same shape: its blocks have other bytes."""

    def block_bytes(self, block: int) -> Bytes:
        """The bytes of a block, to be saved."""
        return super().block_bytes(block) ^ np.uint8(0x5A)


def _stranger_on_disk(**change: Any) -> Plant:
    """A model with other weights has left blocks of the same prompts in the folder.

    change   fields of its geometry that differ, so that its layout is another one
    """
    return lambda _: _with_stranger(change)


@contextmanager
def _with_stranger(change: dict[str, Any]) -> Iterator[None]:
    right = scenario._engine

    def engine(plan: Plan, subject: Subject, expected: Any) -> Any:
        folder = plan.options.kv_disk_path
        if folder is not None and not Path(folder).exists():
            executor = _Stranger(
                num_blocks=400,
                block_tokens=subject.kv.block_tokens,
                vocab_size=subject.model.vocab_size,
                max_batch_tokens=subject.max_batch_tokens,
            )
            executor._geometry = KVGeometry(**{**subject.kv.model_dump(exclude_defaults=True), **change})
            assert executor.kv_geometry.block_bytes == subject.kv.block_bytes
            tiers = partial(open_tiers, options=plan.options)
            identity = "fake" if change else "stranger"
            with Engine(executor, identity=identity, tiers=tiers) as stranger:
                for one in scenario.warm_up(expected):
                    stranger.generate(list(one.request.prompt), one.request.params)
        return right(plan, subject, expected)

    with patch.object(scenario, "_engine", engine):
        yield


def _without_identity(right: Callable[..., bytes]) -> Callable[..., bytes]:
    def root_hash(identity: str, layout: str, **others: str) -> bytes:
        return right("", layout, **others)

    return root_hash


def _without_layout(right: Callable[..., bytes]) -> Callable[..., bytes]:
    def root_hash(identity: str, layout: str, **others: str) -> bytes:
        return right(identity, "", **others)

    return root_hash


def _without_salt(right: Callable[..., Any]) -> Callable[..., Any]:
    def scope(root: bytes, *, cache_salt: str = "", **others: Any) -> Any:
        return right(root, cache_salt="", **others)

    return scope


def _without_adapter(right: Callable[..., Any]) -> Callable[..., Any]:
    def scope(root: bytes, *, adapter: str = "", **others: Any) -> Any:
        return right(root, adapter="", **others)

    return scope


# Class 4: the hash is equal, the tokens are not


@contextmanager
def _truncated_hashes(_: type) -> Iterator[None]:
    """Hashes of three bits, and a hit does not compare tokens."""

    def weak(parent: bytes, tokens: bytes) -> bytes:
        return bytes([sum(tokens) % 8]) * 32

    def find(self: PrefixIndex, content: BlockContent, *more: Any) -> Any:
        return self._block_of.get(content.hash)

    with patch("ingot.runtime.kv.blocks.block_hash", weak), patch.object(PrefixIndex, "find", find):
        yield


# Class 5 and 15: other numbers


def _nudged(logits: FloatArray, rows: Sequence[int]) -> FloatArray:
    """The logits with the largest of each of these rows one step lower."""
    for row in rows:
        best = int(logits[row].argmax())
        logits[row, best] = np.nextafter(logits[row, best], np.float32(-np.inf))
    return logits


def _rows_where(batch: ForwardBatch, wrong: Callable[[int, int], bool]) -> list[int]:
    """Rows of logits of the sequences for which `wrong(tokens in the step, tokens before it)`."""
    counts = np.diff(batch.query_starts)
    sequences = np.searchsorted(batch.query_starts, batch.logits_indices, side="right") - 1
    before = batch.context_lens - counts
    return [row for row, s in enumerate(sequences) if wrong(int(counts[s]), int(before[s]))]


def _other_numbers_after_hits(executor: type) -> AbstractContextManager[object]:
    """A prompt whose beginning is in the pool already gets logits that differ in the last bit."""
    right = executor.forward  # type: ignore[attr-defined]

    def forward(self: Any, batch: ForwardBatch) -> FloatArray:
        logits: FloatArray = right(self, batch)
        return _nudged(logits, _rows_where(batch, lambda tokens, before: tokens > 1 and before > 0))

    return patch.object(executor, "forward", forward)


def _decode_changed_by_chunks(executor: type) -> AbstractContextManager[object]:
    """A decoding sequence gets other logits while a prompt is computed in the same step."""
    right = executor.forward  # type: ignore[attr-defined]

    def forward(self: Any, batch: ForwardBatch) -> FloatArray:
        logits: FloatArray = right(self, batch)
        if np.diff(batch.query_starts).max() == 1:
            return logits
        return _nudged(logits, _rows_where(batch, lambda tokens, before: tokens == 1 and before > 0))

    return patch.object(executor, "forward", forward)


# Class 6: at a block boundary


def _one_token_too_many(right: Callable[..., Any]) -> Callable[..., Any]:
    """A hit that ends at a block boundary counts one token more than its blocks have."""

    def admit(self: BlockManager, sequence_id: int, tokens: Any, *args: Any, **others: Any) -> Admission | None:
        found: Admission | None = right(self, sequence_id, tokens, *args, **others)
        if found and found.cached_tokens and found.cached_tokens + 1 < len(tokens):
            return found._replace(cached_tokens=found.cached_tokens + 1)
        return found

    return admit


# Class 7 and 8: side state


def _state_not_restored(right: Callable[..., Any]) -> Callable[..., Any]:
    """A prefix hit starts from whatever the slot of its side state has."""

    def admit(self: StateManager, sequence_id: int, last_block: bytes | None) -> tuple[StateCopy, ...]:
        right(self, sequence_id, last_block)
        return ()

    return admit


def _state_shorter_than_blocks(right: Callable[..., Any]) -> Callable[..., Any]:
    """A prefix hit takes all its blocks, with the state after the first of them that has one."""

    def admit(self: StateManager, sequence_id: int, last_block: bytes | None) -> tuple[StateCopy, ...]:
        copies: tuple[StateCopy, ...] = right(self, sequence_id, last_block)
        oldest = next(iter(self._snapshots.values()), None)
        return tuple(copy._replace(source=oldest) for copy in copies if oldest is not None)

    return admit


# Class 9: windows


def _window_of_the_whole_chunk(right: Callable[..., Any]) -> Callable[..., Any]:
    """The first tokens of a chunk see only what the window of its last token shows."""

    def read(self: LayeredExecutor, layer: KVLayer, table: Any, start: int, context: int) -> Any:
        seen = right(self, layer, table, start, context)
        lost = max(0, context - start - layer.window) if layer.window else 0
        seen[:lost] ^= np.uint64(start)
        return seen

    return read


# Class 10: failures that count as success


def _failed_copy_arrived(right: Callable[..., Any]) -> Callable[..., Any]:
    """A copy that failed counts as arrived."""

    def end(self: Restores, pool: PoolTiers, block: LoadingBlock, transfer: Any) -> bool:
        right(self, pool, block, transfer)
        return True

    return end


# Class 11: dead threads


@contextmanager
def _silent_death(_: type) -> Iterator[None]:
    """The thread that writes blocks to disk ends, and no error is raised."""
    right = Workers._work

    def work(self: Workers) -> None:
        if "write" not in self._name:
            right(self)

    with ExitStack() as planted:
        planted.enter_context(patch.object(Workers, "_work", work))
        planted.enter_context(patch.object(Workers, "check", lambda _: None))
        planted.enter_context(patch("ingot.runtime.kv.transfers.saves.STALL_SECONDS", 0.1))  # or closing waits for it
        planted.enter_context(patch.object(scenario, "_FLUSH_SECONDS", 0.1))
        yield


# Class 16: bytes rot on disk


def _bytes_rot(_: type) -> AbstractContextManager[object]:
    """One bit of every fourth block changes after it was written."""
    right, numbers = disk_slot.write_slot, count(1)

    def write(file: int, offset: int, content: BlockContent, root: bytes, buffer: memoryview) -> None:
        right(file, offset, content, root, buffer)
        if not next(numbers) % 4:
            end = offset + disk_slot.record_bytes(len(content.tokens), buffer.nbytes)
            os.pwrite(file, bytes([buffer.cast("B")[-1] ^ 1]), end - 1)

    return patch.object(disk_store, "write_slot", write)


def _no_checksum(_: Callable[..., bytes]) -> Callable[..., bytes]:
    return lambda *_: bytes(16)


# Class 12 and 13: speculation


def _past_the_stop(right: Callable[..., Any]) -> Callable[..., Any]:
    """An answer that ends among accepted drafts keeps the draft after its end."""

    def sample(
        self: StepReader, entry: ScheduledSequence, request: Request, rows: Any, outputs: Any, now: float
    ) -> None:
        right(self, entry, request, rows, outputs, now)
        ended = outputs[-1].completion
        if ended and len(outputs) < len(entry.drafts):
            longer = replace(ended, token_ids=(*ended.token_ids, entry.drafts[len(outputs)]))
            outputs[-1] = replace(outputs[-1], completion=longer, result=outputs[-1].result and longer)

    return sample


def _without_matching(_: Callable[..., Any]) -> Callable[..., Any]:
    """Every draft counts as accepted, so that what follows it is sampled after a token that is not in the answer."""

    def sample(
        self: StepReader, entry: ScheduledSequence, request: Request, rows: Any, outputs: Any, now: float
    ) -> None:
        for number, row in enumerate(rows):
            token = request.sample(row)
            self._scheduler.share(entry, number)
            outputs.append(self._requests.count(request.push(token, now)))
            if outputs[-1].completion or number == len(entry.drafts):
                return
            self._scheduler.accept(entry.sequence)

    return sample


def _one_mask_for_all_drafts(right: Callable[..., Any]) -> Callable[..., Any]:
    """The mask of the first row is that of all rows of a request."""

    def prepare(self: Matcher, drafts: Sequence[int]) -> None:
        right(self, drafts)
        self._ahead = [self._ahead[0]] * len(self._ahead)

    return prepare


def _rolls_back(right: Callable[..., Any]) -> Callable[..., Any]:
    """The parser itself follows the drafts and goes back: after that, llguidance 1.9 computes wrong masks."""

    class Uncopied:
        def __init__(self, native: Any) -> None:
            self.deep_copy = lambda: native

        def __getattr__(self, name: str) -> Any:
            return getattr(self.deep_copy(), name)  # type: ignore[no-untyped-call]

    def prepare(self: Matcher, drafts: Sequence[int]) -> None:
        native = self._native
        self._native = Uncopied(native)  # type: ignore[assignment]
        try:
            right(self, drafts)
        finally:
            self._native = native
        if drafts:
            native.rollback(len(drafts))

    return prepare


# Class 14: the output of a preempted request


def _loses_its_newest_token(right: Callable[..., Any]) -> Callable[..., Any]:
    def preempt(self: Scheduler, sequence: EngineSequence, *args: Any) -> Any:
        if len(sequence.tokens) > sequence.num_prompt_tokens and not sequence.num_in_flight:
            del sequence.tokens[-1]
        return right(self, sequence, *args)

    return preempt


def _incomplete_when_preempted(right: Callable[..., Any]) -> Callable[..., Any]:
    """The answer has only what was generated since the last preemption but one token."""

    def complete(self: Request, *args: Any) -> Any:
        if self.sequence.num_preemptions:
            del self._tokens[0]
        return right(self, *args)

    return complete


FAULTS: tuple[Fault, ...] = (
    Fault(
        1,
        "copy not ordered with compute",
        "a restored block is used when its copy is queued, not when it has ended",
        ("swap", "host-restore", "disk-restore"),
        "prefix-hit+host-restore",
        patched(Restores, "_advance", _used_before_it_arrived),
    ),
    Fault(
        2,
        "found, not pinned, evicted before use",
        "cached blocks that a request was admitted with can be evicted",
        ("prefix-hit", "preemption", "minimal-pool"),
        "prefix-hit+preemption",
        patched(BlockManager, "admit", _hits_not_held),
    ),
    Fault(
        2,
        "found, not pinned, evicted before use",
        "blocks that are being saved or restored are not pinned",
        ("failed-transfers",),
        "swap+failed-transfers",
        _no_pins,
    ),
    Fault(
        3,
        "key forgets dtype, adapter, salt, rank, weights",
        "keys of blocks leave out the identity of the weights",
        ("disk-restore",),
        "prefix-hit+disk-restore",
        patched(engine_core, "root_hash", _without_identity),
        trouble=_stranger_on_disk(),
    ),
    Fault(
        3,
        "key forgets dtype, adapter, salt, rank, weights",
        "keys of blocks leave out layout and type of the KV cache",
        ("disk-restore",),
        "prefix-hit+disk-restore",
        patched(engine_core, "root_hash", _without_layout),
        trouble=_stranger_on_disk(head_dim=2, dtype="float16"),
    ),
    Fault(
        3,
        "key forgets dtype, adapter, salt, rank, weights",
        "keys of blocks leave out the cache salt",
        ("prefix-hit",),
        "prefix-hit+chunked-prefill",
        patched(engine_core, "prefix_scope", _without_salt),
    ),
    Fault(
        3,
        "key forgets dtype, adapter, salt, rank, weights",
        "keys of blocks leave out the adapter",
        ("adapter-mates",),
        "prefix-hit+adapter-mates",
        patched(engine_core, "prefix_scope", _without_adapter),
    ),
    Fault(
        4,
        "hash equal, tokens not",
        "block hashes have three bits, and tokens are not compared",
        ("prefix-hit",),
        "prefix-hit+chunked-prefill",
        _truncated_hashes,
    ),
    Fault(
        5,
        "hit path computes other numbers than miss path",
        "logits of a prompt that continues in the pool differ in the last bit",
        ("prefix-hit", "chunked-prefill", "preemption"),
        "prefix-hit+chunked-prefill",
        _other_numbers_after_hits,
    ),
    Fault(
        6,
        "exactly at a block boundary; stale partial block",
        "a hit counts one token more than its blocks have",
        ("prefix-hit",),
        "prefix-hit+chunked-prefill",
        patched(BlockManager, "admit", _one_token_too_many),
    ),
    Fault(
        7,
        "side state with prefix, speculation, restore",
        "a prefix hit does not restore its side state",
        ("prefix-hit", "preemption"),
        "prefix-hit+chunked-prefill",
        patched(StateManager, "admit", _state_not_restored),
        layout="side state",
    ),
    Fault(
        8,
        "side state restored shorter than KV",
        "a prefix hit gets the side state of an earlier block",
        ("prefix-hit", "preemption"),
        "prefix-hit+chunked-prefill",
        patched(StateManager, "admit", _state_shorter_than_blocks),
        layout="side state",
    ),
    Fault(
        9,
        "window with a chunk larger than it; shared KV; unequal heads",
        "a chunk longer than the window loses keys of its first tokens",
        ("chunked-prefill", "prefix-hit", "preemption"),
        "prefix-hit+chunked-prefill",
        patched(LayeredExecutor, "_read", _window_of_the_whole_chunk),
        layout="windows",
    ),
    Fault(
        10,
        "failed load answered as if it had worked",
        "a copy from host memory that failed counts as arrived",
        ("failed-transfers",),
        "prefix-hit+failed-transfers",
        patched(Restores, "_end_restore", _failed_copy_arrived),
    ),
    Fault(
        11,
        "background writer dies silently, queue grows",
        "the thread that writes to disk has died, and no error is raised",
        ("disk-restore",),
        "prefix-hit+disk-restore",
        _silent_death,
    ),
    Fault(
        12,
        "speculation with stop conditions and constraints",
        "an answer that ends among accepted drafts keeps the draft after its end",
        ("lookup",),
        "prefix-hit+lookup",
        patched(StepReader, "_sample", _past_the_stop),
    ),
    Fault(
        12,
        "speculation with stop conditions and constraints",
        "the row after a draft is masked as the row before it",
        ("constraint",),
        "lookup+constraint",
        patched(Matcher, "prepare", _one_mask_for_all_drafts),
    ),
    Fault(
        12,
        "speculation with stop conditions and constraints",
        "the parser goes back over rejected drafts, and is not quite where it was",
        ("constraint",),
        "lookup+constraint",
        patched(Matcher, "prepare", _rolls_back),
        needs_model=True,
    ),
    Fault(
        13,
        "speculation differs from greedy",
        "drafts are accepted without being compared with the sampled token",
        ("lookup",),
        "prefix-hit+lookup",
        patched(StepReader, "_sample", _without_matching),
    ),
    Fault(
        14,
        "output of a preempted request incomplete",
        "the answer of a preempted request lacks a token",
        ("preemption", "minimal-pool"),
        "prefix-hit+preemption",
        patched(Request, "_complete", _incomplete_when_preempted),
    ),
    Fault(
        14,
        "output of a preempted request incomplete",
        "a preempted sequence loses its newest token",
        ("preemption", "minimal-pool"),
        "prefix-hit+preemption",
        patched(Scheduler, "_preempt", _loses_its_newest_token),
    ),
    Fault(
        15,
        "decode changed by another request's chunk",
        "logits of a decoding sequence differ in the last bit while a prompt is computed",
        ("batch-mates", "preemption", "cancelled-mate", "minimal-pool"),
        "prefix-hit+batch-mates",
        _decode_changed_by_chunks,
    ),
    Fault(
        16,
        "bytes rot on disk",
        "the checksum of blocks on disk covers nothing",
        ("disk-restore",),
        "prefix-hit+disk-restore",
        patched(disk_slot, "_checksum", _no_checksum),
        trouble=_bytes_rot,
    ),
)
