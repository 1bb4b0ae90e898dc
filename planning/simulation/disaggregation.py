"""Prompts on some replicas and decoding on others: the KV blocks of a prompt move over a link in between.

A replica of the first pool computes a prompt and the first token. Its blocks are sent then, one prompt after the other
on the link of that replica, and a replica of the second pool generates the rest. Nothing flows back: a pool that
decodes slows no prompt. So the first pool serves all its requests, and the second what follows, in order of arrival.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import NamedTuple

from ingot.artifact import KVGeometry
from ingot.errors import UsageError
from ingot.planning.simulation.figures import EngineTotals, KVTransferFigures
from ingot.planning.simulation.fleet import MOST_REPLICAS, Fleet
from ingot.planning.simulation.simulated_tiers import CopyLink
from ingot.planning.simulation.timed_request import EndedRequest, RequestOutcome, ServedLengths, TimedRequest
from ingot.planning.simulation.traces import RequestLengths


@dataclass(frozen=True)
class ReplicaPools:
    """Replicas for prompts and for decoding.

    link   the way of KV blocks out of one replica
    """

    prefill: int
    decode: int
    link: CopyLink = field(default_factory=CopyLink)

    @classmethod
    def parse(cls, text: str, link: CopyLink) -> "ReplicaPools":
        """Return the pools of a text such as 2:6. UsageError for another."""
        prefill, _, decode = text.partition(":")
        counts = [int(each) if each.isdecimal() and each.isascii() else 0 for each in (prefill, decode)]
        if not all(1 <= each <= MOST_REPLICAS for each in counts):
            raise UsageError(
                f"--disaggregate is {text!r}; it must be PREFILL:DECODE, the replicas for prompts and for decoding,"
                f" each from 1 to {MOST_REPLICAS}, as 2:6"
            )
        return cls(counts[0], counts[1], link)

    @property
    def replicas(self) -> int:
        """Replicas of both pools."""
        return self.prefill + self.decode


class Handover(NamedTuple):
    """A request between the pools: what it was, how its prompt was served, and what the second pool gets."""

    request: TimedRequest
    prompt: RequestOutcome
    rest: TimedRequest


@dataclass
class TransferTotals:
    """KV bytes that moved between the pools, and their seconds, with the wait for the link."""

    count: int = 0
    num_bytes: int = 0
    seconds: float = 0.0

    @property
    def figures(self) -> KVTransferFigures:
        """Means of a prompt."""
        count = max(1, self.count)
        return KVTransferFigures(
            num_transfers=self.count, mean_bytes=self.num_bytes / count, mean_seconds=self.seconds / count
        )


class KVTransfers:
    """Sends the KV blocks of prompts that are computed.

    context_tokens   of the engines; no request has more tokens
    """

    def __init__(self, kv: KVGeometry, link: CopyLink, context_tokens: int) -> None:
        self._kv, self._link, self._context_tokens = kv, link, context_tokens
        self._free_at_of_replica: dict[int, float] = {}
        self.totals = TransferTotals()

    def send(self, request: TimedRequest, prompt: RequestOutcome, replica: int) -> Handover | None:
        """Send what a replica has computed of a request; None where its first token is the last."""
        lengths = request.lengths
        left = min(lengths.output_tokens, self._context_tokens - lengths.prompt_tokens) - 1
        if left < 1:
            return None
        begin = prompt.metrics.finish_seconds
        blocks = -(-lengths.prompt_tokens // self._kv.block_tokens)
        num_bytes = blocks * self._kv.block_bytes + self._kv.state_bytes
        arrival = max(begin, self._free_at_of_replica.get(replica, 0.0)) + self._link.seconds(num_bytes)
        self._free_at_of_replica[replica] = arrival
        totals = self.totals
        totals.count, totals.num_bytes = totals.count + 1, totals.num_bytes + num_bytes
        totals.seconds += arrival - begin
        rest = TimedRequest(
            arrival,
            RequestLengths(lengths.line, lengths.prompt_tokens + 1, left),
            request.block_tokens,
            received_tokens=lengths.prompt_tokens,
            waited_seconds=arrival - request.seconds,
        )
        return Handover(request, prompt, rest)


class DisaggregatedFleet:
    """Serves a load with two fleets, and what moves between them.

    prefill   computes prompts; it keeps places
    """

    def __init__(self, prefill: Fleet, decode: Fleet, transfers: KVTransfers) -> None:
        self._prefill, self._decode, self.transfers = prefill, decode, transfers

    def serve(self, load: Iterable[TimedRequest]) -> Iterator[EndedRequest]:
        """Serve requests, which are in order of arrival; yield what ends."""
        requests: dict[int, TimedRequest] = {}
        handovers: dict[int, Handover] = {}
        for ended in self._prefill.serve(_prompts_alone(load, requests)):
            request, prompt = requests.pop(ended.request.lengths.line), ended.completion
            place = self._prefill.take_place(ended.request)
            handover = None
            if prompt is not None and prompt.finish_reason == "length":
                handover = self.transfers.send(request, prompt, place)
            if handover:
                handovers[request.lengths.line] = handover
            else:
                yield EndedRequest(request, prompt)
        rests = sorted((each.rest for each in handovers.values()), key=attrgetter("seconds"))
        for ended in self._decode.serve(rests):
            yield _joined(handovers.pop(ended.request.lengths.line), ended)

    @property
    def totals(self) -> list[EngineTotals]:
        """Totals of all engines."""
        return [*self._prefill.totals, *self._decode.totals]

    @property
    def most_replicas(self) -> int:
        """The largest number of replicas at a time."""
        return self._prefill.most_replicas + self._decode.most_replicas


def _prompts_alone(load: Iterable[TimedRequest], requests: dict[int, TimedRequest]) -> Iterator[TimedRequest]:
    """Yield requests that end with their first token, and keep the whole ones."""
    for request in load:
        lengths = request.lengths
        requests[lengths.line] = request
        yield replace(request, lengths=replace(lengths, output_tokens=1))


def _joined(handover: Handover, rest: EndedRequest) -> EndedRequest:
    """Return how a request that both pools served has ended."""
    if rest.completion is None:
        return EndedRequest(handover.request, None)
    prompt, end = handover.prompt, rest.completion
    metrics = replace(
        prompt.metrics,
        finish_seconds=end.metrics.finish_seconds,
        num_output_tokens=prompt.metrics.num_output_tokens + end.metrics.num_output_tokens,
        num_preemptions=prompt.metrics.num_preemptions + end.metrics.num_preemptions,
    )
    return EndedRequest(
        handover.request, ServedLengths(end.finish_reason, prompt.prompt_tokens, prompt.cached_tokens, metrics)
    )
