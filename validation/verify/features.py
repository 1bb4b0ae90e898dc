"""The features that must not change an answer, a row each: what it changes in a plan, and what shows that it took part.

To add one, add its row. `shown_by` reads what a run observed and returns a figure, such as "48 cached tokens"; an empty
string means that the run did not exercise the feature, and then its pair proves nothing and fails.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ingot.runtime.speculation_options import DRAFT, LOOKUP, MTP, SUFFIX, DraftSource, SpeculationOptions
from ingot.validation.verify.plan import Observed, Plan, VerifiedAnswer
from ingot.validation.verify.requests import NUM_CHOICES, NUM_DRAFTS
from ingot.validation.verify.subject import Subject

_HOST_BLOCKS = 400
_LEAST_DRAFTED_STEP = 18  # tokens: room for drafts where all requests decode; chunks of it end within blocks
_LEAST_BLOCKS = 12  # least context for requests that share blocks and collide


def _never(subject: Subject) -> str:
    return ""


@dataclass(frozen=True)
class Feature:
    """One feature of the runtime.

    change       returns the plan with the feature, for a subject
    shown_by     the figure that shows that a run exercised it; empty if it did not
    unavailable  why a subject does not have it; empty if it has
    speculates   whether triples with it are verified too
    conflicts    features that one engine cannot have at the same time
    """

    name: str
    summary: str
    change: Callable[[Plan, Subject], Plan]
    shown_by: Callable[[Observed], str]
    unavailable: Callable[[Subject], str] = _never
    speculates: bool = False
    conflicts: tuple[str, ...] = ()


def with_options(plan: Plan, **values: Any) -> Plan:
    """The plan with these options of the engine."""
    return replace(plan, options=replace(plan.options, **values))


def _counted(count: int, unit: str) -> str:
    return f"{count} {unit}" if count else ""


def _needs_full_blocks(subject: Subject) -> str:
    block, context = subject.kv.block_tokens, subject.model.context_tokens
    if _LEAST_BLOCKS * block <= context:
        return ""
    return f"blocks have {block} tokens and the context {context}; at least {_LEAST_BLOCKS} blocks are needed"


# Prefix hit


def _prefix_hit(plan: Plan, subject: Subject) -> Plan:
    return replace(with_options(plan, prefix_cache=True), warm=True)


def _shown_by_hits(observed: Observed) -> str:
    return _counted(sum(one.completion.cached_tokens for one in observed.answers), "cached tokens")


# Chunked prefill


def chunk_tokens(subject: Subject) -> int:
    """Tokens of a chunk: more than a block and not a multiple of one, so that chunks end within blocks."""
    block = subject.kv.block_tokens
    return min(block + max(1, block // 2 - 1), max(1, subject.max_batch_tokens // 2))


def _chunked(plan: Plan, subject: Subject) -> Plan:
    return with_options(plan, max_batch_tokens=chunk_tokens(subject))


def _shown_by_chunks(observed: Observed) -> str:
    """A prompt with more tokens to compute than a step may have was computed in chunks."""
    most = observed.max_batch_tokens
    computed = [one.completion.prompt_tokens - one.completion.cached_tokens for one in observed.answers]
    chunked = [num_tokens for num_tokens in computed if num_tokens > most]
    return f"{len(chunked)} prompts in up to {-(-max(chunked) // most)} chunks" if chunked else ""


# Batch mates


def _mates(plan: Plan, subject: Subject) -> Plan:
    return replace(plan, together=True)


def _shown_by_shared_steps(observed: Observed) -> str:
    return _counted(observed.shared_steps, "shared steps")


# Preemption


def _preempted(plan: Plan, subject: Subject) -> Plan:
    return replace(plan, together=True, pool="minimal" if plan.pool == "minimal" else "tight")


def _shown_by_preemptions(observed: Observed) -> str:
    return _counted(sum(one.completion.metrics.num_preemptions for one in observed.answers), "preemptions")


# Tiers


def _swaps(plan: Plan, subject: Subject) -> Plan:
    return _preempted(_with_host(plan, subject), subject)


def _shown_by_swaps(observed: Observed) -> str:
    return _counted(observed.counted("num_swaps"), "preempted requests resumed from host memory or disk")


def _host(plan: Plan, subject: Subject) -> Plan:
    return replace(_with_host(plan, subject), evicts=True)


def _shown_by_host(observed: Observed) -> str:
    tokens = sum(one.completion.cached_tokens_by_tier.host for one in observed.answers if _is_first(one))
    return _counted(tokens, "tokens restored from host memory")


def _disk(plan: Plan, subject: Subject) -> Plan:
    return replace(with_options(plan, prefix_cache=True, kv_restore="always"), restarts=True)


def _shown_by_disk(observed: Observed) -> str:
    tiers = observed.after_run.kv_tiers if observed.after_run else None
    return _counted(tiers.disk_read_blocks if tiers else 0, "blocks read from disk after a restart")


def _failing(plan: Plan, subject: Subject) -> Plan:
    return replace(_host(plan, subject), fails=True)


def _shown_by_failures(observed: Observed) -> str:
    """A block failed to come back; some came back, or no answer depends on a transfer."""
    failed, restored = observed.failures.failed, _restored(observed)
    loads = failed["restore"] + failed["disk read"]
    stores = failed["save"] + failed["disk write"]
    return f"{loads} loads and {stores} saves failed, {restored} blocks were restored" if loads and restored else ""


def _with_host(plan: Plan, subject: Subject) -> Plan:
    size = _HOST_BLOCKS * (subject.kv.block_bytes + subject.kv.state_bytes)
    return with_options(plan, prefix_cache=True, kv_host_bytes=size, kv_restore="always")


def _is_first(answer: VerifiedAnswer) -> bool:
    """Whether it is the choice that computed the prompt."""
    return answer.completion.index == 0


def _restored(observed: Observed) -> int:
    before = observed.before_run.kv_tiers if observed.before_run else None
    after = observed.after_run.kv_tiers if observed.after_run else None
    return after.restored_blocks - before.restored_blocks if before and after else 0


def _has_no_tiers(subject: Subject) -> str:
    if not subject.has_tiers:
        return "this engine has no tiers for its KV blocks"
    return _needs_full_blocks(subject)


# Speculation


def _lookup(plan: Plan, subject: Subject) -> Plan:
    return _drafted(plan, LOOKUP)


def _suffix(plan: Plan, subject: Subject) -> Plan:
    return _drafted(plan, SUFFIX)


def _mtp(plan: Plan, subject: Subject) -> Plan:
    return _drafted(plan, MTP)


def _has_no_head(subject: Subject) -> str:
    return "" if subject.has_head else "the artifact has no MTP layer"


def _draft(plan: Plan, subject: Subject) -> Plan:
    assert subject.draft is not None
    return _drafted(plan, subject.draft)


def _combined(plan: Plan, subject: Subject) -> Plan:
    models = [MTP] * subject.has_head + [each for each in (subject.draft,) if each]
    return _drafted(plan, (SUFFIX, *models))


def _drafted(plan: Plan, drafter: DraftSource | Sequence[DraftSource]) -> Plan:
    most = plan.options.max_batch_tokens
    return with_options(
        plan,
        speculation=SpeculationOptions(drafter, num_draft_tokens=NUM_DRAFTS, adaptive=False),
        max_batch_tokens=None if most is None else max(most, _LEAST_DRAFTED_STEP),
    )


def _has_no_model(subject: Subject) -> str:
    return "" if subject.has_head else _has_no_draft(subject)


def _has_no_draft(subject: Subject) -> str:
    return "" if subject.draft else "no draft artifact was given; name one with --draft"


def _shown_by_drafts(observed: Observed) -> str:
    """Drafts must have been accepted and rejected: both change what is in the pool."""
    before = observed.before_run.speculation if observed.before_run else None
    after = observed.after_run.speculation if observed.after_run else None
    if before is None or after is None:
        return ""
    tested = after.num_tested_tokens - before.num_tested_tokens
    accepted = after.num_accepted_tokens - before.num_accepted_tokens
    return f"{accepted} drafts accepted, {tested - accepted} rejected" if 0 < accepted < tested else ""


def _shown_by_kinds(observed: Observed) -> str:
    """Drafts of the model were verified, and copied ones too: each kind catches up with what another one gave."""
    before = observed.before_run.speculation if observed.before_run else None
    after = observed.after_run.speculation if observed.after_run else None
    if before is None or after is None or not (figure := _shown_by_drafts(observed)):
        return ""
    counts = {
        kind: count - before.num_draft_tokens_by_kind.get(kind, 0)
        for kind, count in after.num_draft_tokens_by_kind.items()
    }
    of_models = counts.pop(DRAFT, 0) + counts.pop(MTP, 0)
    return f"{figure}, {of_models} drafts of models" if of_models and any(counts.values()) else ""


# Cancellation of a mate


def _cancels(plan: Plan, subject: Subject) -> Plan:
    return replace(plan, together=True, cancels=True)


def _shown_by_cancelled(observed: Observed) -> str:
    """At least one mate was cancelled after it had run."""
    ran = [one for one in observed.cancelled if one.completion.metrics.first_scheduled_seconds is not None]
    return f"{len(ran)} of {len(observed.cancelled)} cancelled mates had run" if ran else ""


# Several choices of a prompt


def _choices(plan: Plan, subject: Subject) -> Plan:
    return replace(plan, choices=NUM_CHOICES)


def _shown_by_choices(observed: Observed) -> str:
    return _counted(sum(one.completion.index > 0 for one in observed.answers), "choices forked from their prompts")


# Constraints


def _constrained(plan: Plan, subject: Subject) -> Plan:
    return replace(plan, constrained=True)


def _shown_by_constraints(observed: Observed) -> str:
    found = [one.completion for one in observed.answers if one.expected.request.params.constraint]
    return _counted(sum(len(one.token_ids) for one in found), f"tokens of {len(found)} answers with a constraint")


# Adapters


def _adapted(plan: Plan, subject: Subject) -> Plan:
    return replace(plan, together=True, adapters=True)


def _shown_by_adapters(observed: Observed) -> str:
    """Requests with different adapters and without any ran in one batch."""
    found = [one.completion for one in observed.answers if one.expected.request.adapter]
    count = sum(len(one.token_ids) for one in found)
    return f"{count} tokens of {len(found)} answers with an adapter" if count and observed.shared_steps else ""


# KV pool of minimal size


def _minimal(plan: Plan, subject: Subject) -> Plan:
    return replace(plan, pool="minimal")


def _shown_by_full_pool(observed: Observed) -> str:
    """An answer whose tokens need every block of the pool had all of them in its last step."""
    assert observed.after_run is not None
    total = observed.after_run.blocks_total
    stored = [one.completion.prompt_tokens + len(one.completion.token_ids) - 1 for one in observed.answers]
    filled = sum(-(-num_tokens // observed.block_tokens) == total for num_tokens in stored)
    return f"{filled} answers needed all {total} blocks" if filled else ""


# KV pool with a slow part


def _slow(plan: Plan, subject: Subject) -> Plan:
    return replace(plan, slow=True)


def _shown_by_slow_blocks(observed: Observed) -> str:
    return _counted(observed.slow_blocks, "blocks of the slow part in use at once")


def _has_no_slow_part(subject: Subject) -> str:
    return _needs_full_blocks(subject) if subject.has_slow_part else "only a KV pool of the CPU has a slow part"


_ROWS = (
    Feature(
        "prefix-hit",
        "prompts find their beginnings in the prefix cache",
        _prefix_hit,
        _shown_by_hits,
        unavailable=_needs_full_blocks,
    ),
    Feature("chunked-prefill", "prompts are computed over several steps", _chunked, _shown_by_chunks),
    Feature("batch-mates", "all requests run at once", _mates, _shown_by_shared_steps),
    Feature(
        "preemption",
        "requests lose their blocks while they run, and compute them again",
        _preempted,
        _shown_by_preemptions,
        unavailable=_needs_full_blocks,
    ),
    Feature(
        "swap",
        "blocks of preempted requests are saved to host memory, and restored when they resume",
        _swaps,
        _shown_by_swaps,
        unavailable=_has_no_tiers,
    ),
    Feature(
        "host-restore",
        "blocks that left the pool are restored from host memory",
        _host,
        _shown_by_host,
        unavailable=_has_no_tiers,
    ),
    Feature(
        "disk-restore",
        "a second engine restores blocks that the first left on disk",
        _disk,
        _shown_by_disk,
        unavailable=_has_no_tiers,
    ),
    Feature(
        "failed-transfers",
        "copies and disk reads come late, and some of them fail",
        _failing,
        _shown_by_failures,
        unavailable=_has_no_tiers,
    ),
    Feature(
        "lookup",
        "drafts copied from prompt and output are verified, several in a step",
        _lookup,
        _shown_by_drafts,
        speculates=True,
        conflicts=("suffix", "mtp", "draft", "combined"),
    ),
    Feature(
        "suffix",
        "drafts copied from finished outputs, too, are verified",
        _suffix,
        _shown_by_drafts,
        speculates=True,
        conflicts=("lookup", "mtp", "draft", "combined"),
    ),
    Feature(
        "mtp",
        "drafts by the artifact's MTP layer are verified",
        _mtp,
        _shown_by_drafts,
        unavailable=_has_no_head,
        speculates=True,
        conflicts=("lookup", "suffix", "draft", "combined"),
    ),
    Feature(
        "draft",
        "drafts of a smaller model, with a KV pool of its own, are verified",
        _draft,
        _shown_by_drafts,
        unavailable=_has_no_draft,
        speculates=True,
        conflicts=("lookup", "suffix", "mtp", "combined"),
    ),
    Feature(
        "combined",
        "drafts of several kinds, copied and of models, are verified in turns",
        _combined,
        _shown_by_kinds,
        unavailable=_has_no_model,
        speculates=True,
        conflicts=("lookup", "suffix", "mtp", "draft"),
    ),
    Feature("choices", "requests have three choices each, which share their prompt", _choices, _shown_by_choices),
    Feature("cancelled-mate", "mates are cancelled in every state", _cancels, _shown_by_cancelled),
    Feature(
        "minimal-pool",
        "the KV pool holds no more than the largest request",
        _minimal,
        _shown_by_full_pool,
        unavailable=_needs_full_blocks,
    ),
    Feature(
        "slow-part",
        "half of the blocks of the largest request are in the slow part of the KV pool, and blocks move",
        _slow,
        _shown_by_slow_blocks,
        unavailable=_has_no_slow_part,
    ),
    Feature(
        "constraint",
        "requests whose text must follow a schema or a pattern run too",
        _constrained,
        _shown_by_constraints,
        unavailable=lambda subject: subject.no_constraints,
    ),
    Feature(
        "adapter-mates",
        "requests with LoRA adapters, and the same prompts with others or none, run at once",
        _adapted,
        _shown_by_adapters,
        unavailable=lambda subject: subject.no_adapters,
    ),
)

FEATURES: Mapping[str, Feature] = {row.name: row for row in _ROWS}
