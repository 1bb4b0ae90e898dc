"""A trace's requests in a model's size, and an engine that answers them in turns: its hits, answers and step times."""

import hashlib
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.kv.step_times import Step, Work
from ingot import Engine, SamplingParams
from ingot.planning.simulation.traces import MOONCAKE_BLOCK_TOKENS, block_token_ids
from ingot.runtime.asking.outputs import Completion

_OUTPUT_ROOM = 64  # tokens of the context that are left for the output
_COUNTERS = ("saved_blocks", "dropped_saves", "restored_blocks", "disk_read_blocks", "disk_written_blocks")


@dataclass(frozen=True)
class Request:
    """A prompt, how many tokens to generate, and the chain of the trace's blocks that the prompt is made of."""

    prompt: tuple[int, ...]
    output_tokens: int
    chain: tuple[bytes, ...]


@dataclass
class Replay:
    """Answers, hits and step times of one engine."""

    seconds: float = 0.0
    answers: dict[int, str] = field(default_factory=dict)  # digests of the tokens, by request
    cached: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    steps: list[Step] = field(default_factory=list)
    tiers: dict[str, int] = field(default_factory=dict)


def scaled_requests(trace: Path, limit: int, *, block_tokens: int, context_tokens: int, vocab: int) -> list[Request]:
    """The first requests of a trace, in the model's size."""
    most_blocks = (context_tokens - _OUTPUT_ROOM) // block_tokens
    requests = []
    for line in trace.read_text("utf-8").splitlines()[:limit]:
        row = json.loads(line)
        ids = row["hash_ids"][:most_blocks]
        prompt = [token for each in ids for token in block_token_ids(each, block_tokens, vocab)]
        output = min(_OUTPUT_ROOM - 1, max(1, row["output_length"] * block_tokens // MOONCAKE_BLOCK_TOKENS))
        chain = tuple(each.to_bytes(8, "big") for each in ids)
        requests.append(Request((*prompt, 3 + ids[-1] % (vocab - 3)), output, chain))
    return requests


class Lane:
    """An engine that answers the requests, in as many turns as it is given."""

    def __init__(self, engine: Engine, requests: Sequence[Request], in_flight: int) -> None:
        self.engine, self.result = engine, Replay()
        self._waiting, self._in_flight = iter(enumerate(requests)), in_flight
        self._running: dict[int, int] = {}
        self._work: Work | None = None  # of the last step
        self._executor_forward = engine._executor.forward
        engine._executor.forward = self._forward  # type: ignore[method-assign]

    def advance(self, num_requests: int) -> bool:
        """Step until so many more requests were answered; False when all are."""
        started, goal = time.perf_counter(), len(self.result.answers) + num_requests
        self._fill()
        while self._running and len(self.result.answers) < goal:
            self._step()
            self._fill()
        self.result.seconds += time.perf_counter() - started
        self.result.tiers = self._tier_counts()
        return bool(self._running)

    def _forward(self, batch: Any) -> Any:
        self._work = Work(np.diff(batch.query_starts), batch.context_lens.copy())
        return self._executor_forward(batch)

    def _fill(self) -> None:
        while len(self._running) < self._in_flight and (following := next(self._waiting, None)):
            index, request = following
            params = SamplingParams(max_tokens=request.output_tokens, ignore_eos=True)
            self._running[self.engine.add(list(request.prompt), params)] = index

    def _step(self) -> None:
        self._work = None
        counts, was_moving, started = self._tier_counts(), self._is_moving, time.perf_counter()
        outputs = self.engine.step()
        seconds = time.perf_counter() - started
        moved = was_moving or self._is_moving or self._tier_counts() != counts
        if self._work:
            self.result.steps.append(Step(seconds, self._work, moved))
        for output in outputs:
            if output.completion:
                self._answer(self._running.pop(output.request_id), output.completion)

    def _answer(self, index: int, completion: Completion) -> None:
        if completion.error is None:
            self.result.answers[index] = hashlib.sha256(repr(completion.token_ids).encode()).hexdigest()[:12]
        self.result.prompt_tokens += completion.prompt_tokens
        self.result.cached.update(completion.cached_tokens_by_tier._asdict())

    def wait_for_transfers(self) -> None:
        """Wait until no block moves. The engine makes no steps meanwhile, so what is queued is begun here."""
        tiers = self.engine.tiers
        while tiers and tiers.is_moving:
            tiers.start()
            tiers.wait()
            tiers.poll()  # what has ended counts as moving until the engine takes note of it

    @property
    def _is_moving(self) -> bool:
        return self.engine._tiers is not None and self.engine._tiers.is_moving

    def _tier_counts(self) -> dict[str, int]:
        tiers = self.engine._tiers
        metrics = tiers.metrics() if tiers else None
        return {name: getattr(metrics, name) for name in (*_COUNTERS, "failed_transfers")} if metrics else {}
