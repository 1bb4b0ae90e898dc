"""Counts of drafts: what the speculator adds up, and what `EngineMetrics.speculation` shows of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from ingot.runtime.metric_rows import counter, gauge


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationMetrics:
    """Drafts since the engine was made.

    num_drafts                     times that a request had drafts in a step
    num_draft_tokens               drafts that were computed
    num_tested_tokens              of these, the ones up to the first that was rejected
    num_accepted_tokens            of these, the accepted ones
    num_accepted_tokens_per_pos    accepted drafts by position, from 0 on
    num_drafts_per_length          `num_drafts` by number of drafts, from 1 on
    num_drafts_by_kind             `num_drafts` by kind of drafter
    num_draft_tokens_by_kind       `num_draft_tokens` by kind of drafter
    num_accepted_tokens_by_kind    `num_accepted_tokens` by kind of drafter
    num_failures                   calls of a drafter that raised
    """

    num_drafts: Annotated[
        int, counter("spec_decode_num_drafts", "drafts", "Times that a request had drafts in a step.", in_vllm=True)
    ] = 0
    num_draft_tokens: Annotated[
        int, counter("spec_decode_num_draft_tokens", "tokens", "Drafts that were computed.", in_vllm=True)
    ] = 0
    num_accepted_tokens: Annotated[
        int, counter("spec_decode_num_accepted_tokens", "tokens", "Drafts that were accepted.", in_vllm=True)
    ] = 0
    num_accepted_tokens_per_pos: Annotated[
        Mapping[str, int],
        counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "tokens",
            "The same by position of the draft, from 0.",
            label="position",
            in_vllm=True,
        ),
    ] = field(default_factory=dict)
    num_tested_tokens: Annotated[
        int, counter("spec_decode_num_tested_tokens", "tokens", "Drafts up to the first rejected one.")
    ] = 0
    num_drafts_per_length: Annotated[
        Mapping[str, int],
        counter(
            "spec_decode_num_drafts_per_length", "drafts", "spec_decode_num_drafts by number of drafts.", label="length"
        ),
    ] = field(default_factory=dict)
    num_drafts_by_kind: Annotated[
        Mapping[str, int],
        counter("spec_decode_num_drafts_by_kind", "drafts", "spec_decode_num_drafts by kind of drafter.", label="kind"),
    ] = field(default_factory=dict)
    num_draft_tokens_by_kind: Annotated[
        Mapping[str, int],
        counter(
            "spec_decode_num_draft_tokens_by_kind",
            "tokens",
            "spec_decode_num_draft_tokens by kind of drafter.",
            label="kind",
        ),
    ] = field(default_factory=dict)
    num_accepted_tokens_by_kind: Annotated[
        Mapping[str, int],
        counter(
            "spec_decode_num_accepted_tokens_by_kind",
            "tokens",
            "spec_decode_num_accepted_tokens by kind of drafter.",
            label="kind",
        ),
    ] = field(default_factory=dict)
    num_failures: Annotated[
        int,
        counter("spec_decode_num_failures", "calls", "Calls of a drafter that raised."),
        gauge(
            "spec_decode_acceptance_rate",
            "1",
            "Acceptance of drafts whose predecessors all were.",
            source="acceptance_rate",
        ),
        gauge("spec_decode_mean_accepted_length", "tokens", "Tokens per verification.", source="mean_accepted_length"),
        gauge(
            "spec_decode_expected_accepted_length",
            "tokens",
            "The same if drafts were independent.",
            source="expected_accepted_length",
        ),
    ] = 0

    @property
    def acceptance_rate(self) -> float | None:
        """Share of drafts that equal the token of their place, of those whose predecessors did; None without drafts."""
        return self.num_accepted_tokens / self.num_tested_tokens if self.num_tested_tokens else None

    @property
    def mean_accepted_length(self) -> float | None:
        """Tokens per verification, the one sampled after the last accepted draft included; None without drafts."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else None

    @property
    def expected_accepted_length(self) -> float | None:
        """The mean accepted length if every draft were accepted independently with the acceptance rate a.

        That is (1 - a^(g + 1)) / (1 - a) for g drafts (Leviathan et al., 2023), averaged over the numbers of drafts.
        """
        rate = self.acceptance_rate
        if rate is None:
            return None
        counts = {int(length): count for length, count in self.num_drafts_per_length.items()}
        total = sum(count * sum(rate**power for power in range(length + 1)) for length, count in counts.items())
        return total / self.num_drafts


@dataclass(slots=True)
class _KindCounts:
    """Drafts of one kind."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted: int = 0


@dataclass(slots=True)
class SpeculationCounters:
    """The same while it grows; lists are by position and by length."""

    num_tested: int = 0
    accepted_at: list[int] = field(default_factory=list)
    num_of_length: list[int] = field(default_factory=list)
    by_kind: dict[str, _KindCounts] = field(default_factory=dict)
    num_failures: int = 0

    def count(self, kind: str, num_drafts: int, num_tested: int, num_accepted: int) -> None:
        """Add the drafts that one sequence had in one step."""
        for counts in (self.accepted_at, self.num_of_length):
            counts.extend([0] * (num_drafts - len(counts)))
        of_kind = self.by_kind.setdefault(kind, _KindCounts())
        of_kind.num_drafts += 1
        of_kind.num_draft_tokens += num_drafts
        of_kind.num_accepted += num_accepted
        self.num_tested += num_tested
        self.num_of_length[num_drafts - 1] += 1
        for position in range(num_accepted):
            self.accepted_at[position] += 1

    def snapshot(self) -> SpeculationMetrics:
        """The counts so far."""
        kinds = self.by_kind.copy()  # any thread may ask
        return SpeculationMetrics(
            num_drafts=sum(self.num_of_length),
            num_draft_tokens=sum(counts.num_draft_tokens for counts in kinds.values()),
            num_tested_tokens=self.num_tested,
            num_accepted_tokens=sum(self.accepted_at),
            num_accepted_tokens_per_pos={str(position): count for position, count in enumerate(self.accepted_at)},
            num_drafts_per_length={str(length): count for length, count in enumerate(self.num_of_length, 1)},
            num_drafts_by_kind={kind: counts.num_drafts for kind, counts in kinds.items()},
            num_draft_tokens_by_kind={kind: counts.num_draft_tokens for kind, counts in kinds.items()},
            num_accepted_tokens_by_kind={kind: counts.num_accepted for kind, counts in kinds.items()},
            num_failures=self.num_failures,
        )
