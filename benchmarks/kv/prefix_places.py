"""A prompt whose prefix is on the device, in host memory alone, or on disk alone, and its time to the first token."""

import os
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import click
import numpy as np

from ingot.artifact import Artifact
from ingot.runtime import Completion, Engine, SamplingParams
from ingot.runtime.asking.request_options import RequestOptions
from ingot.runtime.kv.cost_model import CostModel, TierName
from ingot.runtime.kv.keys import BlockContent

Place = Literal["computed", "device", "host", "disk"]
_PARAMS = SamplingParams(max_tokens=1, ignore_eos=True)


@dataclass(frozen=True)
class Case:
    """Tokens of a prefix, of the prompt after it, and how many such prompts are computed."""

    prefix_tokens: int
    new_tokens: int
    cold_rounds: int

    @classmethod
    def parse(cls, text: str) -> "Case":
        """From "PREFIX,NEW,COLD"."""
        try:
            case = cls(*map(int, text.split(",")))
        except (ValueError, TypeError):
            raise click.BadParameter(f"{text!r}; give PREFIX,NEW,COLD, such as 2000,80,3") from None
        if min(asdict(case).values()) < 1:
            raise click.BadParameter(f"{text!r}; all three numbers must be at least 1")
        return case


class Conversation:
    """One prompt, and an engine with tiers that answers it again and again, with its prefix where it is asked to be."""

    def __init__(self, artifact: Artifact, folder: Path, case: Case, threads: int | None, prompt: list[int]) -> None:
        self._artifact, self._folder, self._threads, self._prompt = artifact, folder, threads, prompt
        self._block_tokens = artifact.manifest.kv.block_tokens
        self._num_prefix_blocks = case.prefix_tokens // self._block_tokens
        self._first: Completion | None = None
        self.engine = self._load()

    def _load(self) -> Engine:
        geometry = self._artifact.manifest.kv
        blocks = -(-len(self._prompt) // geometry.block_tokens) + 4
        engine = Engine.load(
            self._artifact,
            kv_blocks=blocks,
            kv_host_bytes=2 * blocks * geometry.block_bytes,
            kv_disk_path=self._folder,
            kv_disk_bytes=4 * blocks * (geometry.block_bytes + 4096),
            kv_restore="always",  # this measures restoring also where the model would rather compute
            num_threads=self._threads,
        )
        assert engine._tiers is not None
        self.costs: CostModel = engine._tiers.costs
        self._contents = list(
            engine._blocks.contents(array("q", self._prompt), engine._scope(RequestOptions(), adapter=None))
        )
        return engine

    def restart(self) -> None:
        """Close the engine, which leaves all blocks on disk, and load it again."""
        self.close()
        self.engine = self._load()
        self.warm_up()

    def close(self) -> None:
        """End the engine."""
        self.engine.close()

    def warm_up(self) -> None:
        """Answer a prompt of less than a block: the first step of an engine touches new memory."""
        self.engine.generate(self._prompt[-(self._block_tokens - 1) :], _PARAMS)

    def first_token(self, place: Place) -> float:
        """Seconds to the first token; AssertionError unless the prefix was exactly there, or for other logits."""
        completion = self.engine.generate(self._prompt, _PARAMS, keep_logits=True)
        cached = self._num_prefix_blocks * self._block_tokens if place != "computed" else 0
        found = {name: tokens for name, tokens in completion.cached_tokens_by_tier._asdict().items() if tokens}
        assert found == ({place: cached} if cached else {}), f"the prefix was in {found}, not in {place}"
        self._first = self._first or completion
        assert np.array_equal(self._first.logits, completion.logits), "logits differ"  # type: ignore[arg-type]
        seconds = completion.metrics.ttft_seconds
        assert seconds is not None
        return seconds

    def would_restore(self, tier: TierName) -> bool:
        """Whether the cost model restores the whole prefix where it is free to choose."""
        self.costs._rule = "auto"
        decision = self.costs.decide([tier] * self._num_prefix_blocks, 0)
        self.costs._rule = "always"
        return decision.num_blocks == self._num_prefix_blocks

    def move(self, place: Place) -> None:
        """Leave the prefix in one place, and the blocks after it nowhere."""
        assert self.engine.flush_kv()
        prefix, ends = self._contents[: self._num_prefix_blocks], self._contents[self._num_prefix_blocks :]
        self._evict(ends if place == "device" else self._contents)
        tiers = self.engine._tiers
        assert tiers is not None
        disk = tiers._block_tiers.disk
        assert disk is not None
        assert tiers._store is not None
        with tiers._lock:
            for content in self._contents if place in ("disk", "computed") else ends:
                if (block := tiers.host.find(content)) is not None:
                    tiers.host.lose(block)
            for content in self._contents if place == "computed" else ends:
                tiers._store.remove(content.hash)
            assert all(disk.contains(content.hash) for content in prefix) or place == "computed"

    def _evict(self, contents: Sequence[BlockContent]) -> None:
        """Take blocks from the pool, as a step does that needs others."""
        blocks = self.engine._blocks
        for content in contents:
            block = blocks._index.find(content)
            if block is not None:
                assert block not in blocks._pins
                del blocks._idle[block]
                blocks._unindex(block)
                blocks._free.append(block)


def drop_from_page_cache(folder: Path) -> float:
    """Ask the system to forget the files of a folder; returns the share of files whose first page it did forget."""
    dropped = []
    for path in (path for path in folder.rglob("*.kvs") if path.is_file()):
        file = os.open(path, os.O_RDWR)
        try:
            os.fsync(file)  # only clean pages can be dropped
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            dropped.append(not _is_cached(file))
        finally:
            os.close(file)
    return sum(dropped) / len(dropped)


def _is_cached(file: int) -> bool:
    try:
        os.preadv(file, [bytearray(1)], 0, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    return True
