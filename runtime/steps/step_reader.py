"""What the logits of a step give to its requests: tokens and outputs, forks of choices, the next beams.

A step may verify drafts (`ingot.runtime.speculation`). Their rows are sampled in order, each with the parameters and
the random number of its place in the output, up to the first token that differs from its draft or ends the request. So
they are the tokens of plain decoding, and rows after that one are never looked at.

Whatever is raised here ends one request, and no other.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice

import numpy as np

from ingot.runtime.asking.outputs import RequestOutput, joined
from ingot.runtime.constraints.matcher import Mask
from ingot.runtime.cpu.native.sample_tokens import SKIPPED, mask_logits, sample_tokens
from ingot.runtime.forward_batch import FloatArray
from ingot.runtime.kv.blocks import Copy
from ingot.runtime.requests.request import Request
from ingot.runtime.requests.sampler import NonFiniteLogits
from ingot.runtime.scheduling.scheduler import Scheduler
from ingot.runtime.scheduling.sequence import ScheduledBatch, ScheduledSequence
from ingot.runtime.speculation.speculator import Speculator
from ingot.runtime.steps.beams import BeamGroup, BeamMoves
from ingot.runtime.steps.open_requests import OpenRequests
from ingot.runtime.steps.service_rates import Served
from ingot.runtime.steps.step_pipeline import first_index
from ingot.runtime.truncation_sampling import TokenChoice

Row = FloatArray | int  # logits [vocab], or a token that was sampled on the device or with the rows of its step


class StepReader:
    """Reads the rows of computed steps. `make_copies` copies blocks and side state on the device."""

    def __init__(
        self,
        requests: OpenRequests,
        scheduler: Scheduler,
        speculator: Speculator | None,
        make_copies: Callable[[Iterable[Copy]], None],
    ) -> None:
        self._requests = requests
        self._scheduler = scheduler
        self._speculator = speculator
        self._make_copies = make_copies

    def read(self, batch: ScheduledBatch, rows: Iterable[Row], now: float, *, num_discarded: int = 0) -> None:
        """Sample, append the tokens to their requests and queue the outputs. `rows` are those of all entries."""
        requests, metrics = self._requests, self._requests.metrics
        metrics.count(batch.num_tokens, num_discarded)
        unread, has_prefill = iter(rows), False
        for entry in batch.entries:
            has_prefill = has_prefill or entry.num_tokens > 1
            num_logits = entry.num_logits
            if not num_logits:
                continue
            its_rows = list(islice(unread, num_logits))
            request = requests.by_sequence.get(entry.sequence.id)
            if request and entry.all_logits:
                its_rows = self._read_prompt(entry, request, its_rows)
                request = requests.by_sequence.get(entry.sequence.id)
            if not request or not entry.samples:
                continue  # it has ended since, or there is more of its prompt
            if request.id in requests.searches:
                self._read_beam(entry, requests.searches[request.id], request, its_rows[0], now)
            elif request.id in requests.families and requests.unforked(request):
                self._read_forked(entry, request, its_rows, now)
            else:
                self._read_choice(entry, request, its_rows, now)
        metrics.stepped(now, len(batch.entries), has_prefill=has_prefill)
        num_admitted = self._scheduler.waiting.num_admitted_tokens
        requests.rates.record(Served(metrics.computed_tokens, num_admitted, metrics.num_finished), now)

    def _read_prompt(self, entry: ScheduledSequence, request: Request, rows: list[Row]) -> list[Row]:
        """Read the logits after the prompt's tokens, except the last; returns the rows that are left to sample from."""
        last = entry.num_tokens - entry.samples
        try:
            request.read_prompt(entry.start, rows[:last])
        except Exception as error:  # noqa: BLE001 (the request's output has it)
            self._fail(request, error)
        return rows[last:]

    def _read_forked(self, entry: ScheduledSequence, request: Request, rows: list[Row], now: float) -> None:
        """Read the logits after a prompt for each choice of its request."""
        forked = self._fork(request)
        if request.sequence.id in self._requests.by_sequence:  # the copy of its side state did not fail
            self._read_choice(entry, request, rows, now)
        for choice in forked:
            if choice.sequence.id in self._requests.by_sequence:
                self._read_choice(entry._replace(sequence=choice.sequence), choice, rows, now)

    def _fork(self, request: Request) -> list[Request]:
        """The other choices of a request whose prompt was just computed: they sample from the same logits."""
        family = self._requests.unforked(request)
        if family is None:
            return []
        children = family.fork()
        copies = self._scheduler.fork(request.sequence, [child.sequence for child in children])
        self._requests.start(children)
        self._make_copies(copies)
        return children

    def _read_choice(self, entry: ScheduledSequence, request: Request, rows: list[Row], now: float) -> None:
        outputs: list[RequestOutput] = []
        error: Exception | None = None
        previous = request.last_token_seconds
        try:
            self._sample(entry, request, rows, outputs, now)
        except Exception as raised:  # noqa: BLE001 (the request's output has it)
            error = raised
        if entry.drafts and self._speculator:
            self._speculator.verified(entry, [output.token_ids[0] for output in outputs])
        if outputs:  # also those before an error
            metrics = self._requests.metrics
            metrics.output_tokens += len(outputs)
            if previous is None:
                metrics.first_token(now - request.arrival_seconds, request.num_own_prompt_tokens)
            else:
                metrics.itl_seconds.observe(now - previous)
            put = self._requests.put if self._requests.families else self._requests.outputs.put
            put(joined(outputs))
        if error:
            self._fail(request, error)
        elif outputs[-1].completion:
            self._requests.take_out([request])
        elif entry.drafts:
            self._make_copies(self._scheduler.drop_rejected(entry))

    def _sample(
        self, entry: ScheduledSequence, request: Request, rows: list[Row], outputs: list[RequestOutput], now: float
    ) -> None:
        """Sample rows up to the first token that differs from its draft or ends the request."""
        drafts: tuple[int | None, ...] = (*entry.drafts, None)
        if entry.drafts:
            request.drafted(len(entry.drafts))
        for num_accepted, (row, draft) in enumerate(zip(rows, drafts, strict=True)):
            token = request.sample(row)
            if token.token_id == draft:
                request.accepted()
            self._scheduler.share(entry, num_accepted)
            output = request.push(token, now)
            outputs.append(output)
            if output.completion:
                self._requests.count(output)
            if output.completion or token.token_id != draft:
                return
            self._scheduler.accept(entry.sequence)

    def _read_beam(self, entry: ScheduledSequence, group: BeamGroup, beam: Request, row: Row, now: float) -> None:
        """Read the logits after a beam; after the last of a search, choose its next beams."""
        assert not isinstance(row, int), "beams are chosen on the host"
        try:
            group.read(beam, row)
            self._scheduler.share(entry)
            if group.is_complete:
                if not group.num_steps:
                    metrics = self._requests.metrics
                    metrics.first_token(now - beam.arrival_seconds, beam.sequence.num_prompt_tokens)
                self._advance_beams(group, group.advance(now))
        except Exception as error:  # noqa: BLE001 (the request's output has it)
            self._fail(beam, error)

    def _advance_beams(self, group: BeamGroup, moves: BeamMoves) -> None:
        requests = self._requests
        requests.take_out(moves.removed)
        requests.metrics.output_tokens += 1
        copies: list[Copy] = []
        for parent, children in moves.forked:
            copies += self._scheduler.fork(parent.sequence, [child.sequence for child in children])
            requests.start(children)
        for beam, token in moves.continued:
            beam.extend(token)
            self._scheduler.resume(beam.sequence)
        self._make_copies(copies)
        if group.is_done and group.id in requests.searches:  # no copy failed
            requests.finish_search(group)

    def _fail(self, request: Request, error: Exception) -> None:
        """End a request that failed by itself."""
        if isinstance(error, NonFiniteLogits):
            self._scheduler.discard(request.sequence)
        self._requests.fail([request], error)


def sampled_rows(logits: FloatArray, requests: Sequence[Request], all_requests: OpenRequests) -> list[Row]:
    """A token for each row of logits [R, vocab], sampled for the row's request; the row where its request reads it.

    So does one whose logits are not finite, which fails, and one with choices that sample from the same row.
    """
    choices: list[TokenChoice] = []
    uniforms: list[float] = []
    masks: dict[int, Mask] = {}  # of rows whose request has a constraint, as far as they were prepared
    index, previous = 0, None
    for row, request in enumerate(requests):
        is_skipped = request.reads_logits or (all_requests.families and all_requests.unforked(request))
        choices.append(SKIPPED if is_skipped else request.sampler.choice)
        uniforms.append(0.0)
        if choices[row].factor > 0:
            index = index + 1 if request is previous else first_index(request)
            uniforms[row] = request.sampler.uniform(index)
        if request.matcher and request is not previous:
            masks.update(enumerate(request.matcher.masks_ahead, row))
        previous = request
    if not masks:
        tokens = sample_tokens(logits, choices, uniforms)
    else:
        unmasked = [SKIPPED if row in masks else choice for row, choice in enumerate(choices)]
        tokens = sample_tokens(logits, unmasked, uniforms)
        masks = {row: mask for row, mask in masks.items() if choices[row] is not SKIPPED}
        if masks:
            _sample_masked(logits, masks, choices, uniforms, tokens)
    return [token if token >= 0 else row for token, row in zip(tokens, logits, strict=True)]


def _sample_masked(
    logits: FloatArray,
    masks: Mapping[int, Mask],
    choices: Sequence[TokenChoice],
    uniforms: Sequence[float],
    tokens: list[int],
) -> None:
    """Sample the rows that have masks, into `tokens`; one that is not finite stays without a token."""
    rows = [*masks]
    masked = np.empty((len(rows), logits.shape[1]), np.float32)  # [rows with masks, vocab]
    is_finite = [mask_logits(logits[row], masks[row], masked[place]) for place, row in enumerate(rows)]
    sampled = sample_tokens(masked, [choices[row] for row in rows], [uniforms[row] for row in rows])
    for row, token, finite in zip(rows, sampled, is_finite, strict=True):
        tokens[row] = token if finite else -1
