"""Figures about generated text for `ingot run`: of one completion, of many, and of the engine."""

from collections.abc import Mapping, Sequence
from statistics import quantiles

from ingot.cli.terminal.console import print_note
from ingot.runtime import METRICS, Completion, Engine, EngineMetrics, HistogramSnapshot
from ingot.runtime.kv.tier_metrics import DiskMetrics
from ingot.runtime.speculation.counters import SpeculationMetrics
from ingot.sizes import format_bytes


def pace(done: Completion) -> str:
    """Number of tokens, why they ended, time to the first and tokens per second."""
    metrics = done.metrics
    speed = f", {1 / metrics.tpot_seconds:.0f} tokens/s" if metrics.tpot_seconds else ""
    first = f"; first token after {metrics.ttft_seconds * 1e3:.0f} ms" if metrics.ttft_seconds else ""
    return f"{len(done.token_ids)} tokens, {done.finish_reason}{first}{speed}"


def completion_facts(done: Completion) -> dict[str, object]:
    """A completion as JSON: choice 0, and where the request had several, all of them in `choices`."""
    facts = _choice_facts(done)
    return facts | {"choices": [_choice_facts(one) for one in done.choices]} if done.others else facts


def _choice_facts(done: Completion) -> dict[str, object]:
    ranks = {"mean_logprob": done.mean_logprob, "score": done.score}
    return {
        "index": done.index,
        "text": done.text,
        "token_ids": list(done.token_ids),
        "finish_reason": done.finish_reason,
        "seed": done.seed,
        **{name: value for name, value in ranks.items() if value is not None},
        "prompt_tokens": done.prompt_tokens,
        "cached_tokens": done.cached_tokens,
        "cached_tokens_by_tier": done.cached_tokens_by_tier._asdict(),
        "ttft_seconds": done.metrics.ttft_seconds,
        "tpot_seconds": done.metrics.tpot_seconds,
        "e2e_seconds": done.metrics.e2e_seconds,
    }


def print_stats(engine: Engine) -> None:
    """Print what the engine computed so far, on stderr."""
    for line in stats_lines(engine.metrics()):
        print_note(line)


def flush_to_disk(engine: Engine) -> None:
    """Write what is cached to a disk tier now, as closing the engine would: so the last figures include it."""
    tiers = engine.metrics().kv_tiers
    if tiers and tiers.disk:
        engine.flush_kv()


def stats_lines(found: EngineMetrics) -> list[str]:
    """The most useful metrics in words: work, latencies, prefix cache and KV pool, preemptions, speculation."""
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(found.finished_by_reason.items()))
    lines = [
        f"engine: {found.num_finished} requests ended ({reasons or 'none yet'}), {found.num_steps} steps, "
        f"{found.computed_tokens} tokens computed, {found.output_tokens} generated"
    ]
    latencies = (
        ("first token", found.ttft_seconds),
        ("between tokens", found.itl_seconds),
        ("queue", found.queue_seconds),
    )
    shown = [f"{title} {_quantiles(histogram)}" for title, histogram in latencies if histogram.num_observed]
    if shown:
        lines.append("; ".join(shown))
    queries, hits = found.prefix_query_tokens, found.prefix_hit_tokens
    by_tier = ", ".join(f"{count} from {tier}" for tier, count in found.prefix_hit_tokens_by_tier.items())
    lines.append(
        f"prefix cache: {hits} of {queries} tokens ({hits / queries if queries else 0:.0%}"
        f"{f'; {by_tier}' if found.kv_tiers else ''}); KV pool: {found.blocks_total} blocks, "
        f"{found.blocks_cached} cached"
    )
    if found.blocks_slow:
        moves = ", ".join(f"{count} moved {move}" for move, count in found.blocks_moved.items())
        lines.append(f"slow part: {found.blocks_slow} of these blocks, {found.blocks_slow_in_use} in use; {moves}")
    if found.kv_tiers:
        moved = ", ".join(f"{move} {format_bytes(count)}" for move, count in found.kv_tiers.moved_bytes.items())
        lines.append(f"host memory: {found.kv_tiers.host_blocks} of {found.kv_tiers.host_blocks_total} blocks; {moved}")
        if found.kv_tiers.disk:
            lines.append(_disk(found.kv_tiers.disk))
    if found.num_preemptions or found.num_failed_requests or found.num_failed_steps:
        lines.append(
            f"{found.num_preemptions} preemptions, {found.num_yields} of them for urgent requests; "
            f"{found.num_failed_requests} requests and {found.num_failed_steps} steps failed"
        )
    if found.speculation and found.speculation.num_drafts:
        lines.append(_speculation(found.speculation))
    return lines


def stats_facts(found: EngineMetrics) -> dict[str, object]:
    """Every metric as JSON, by its name in docs/metrics.md; a histogram as count, mean and percentiles.

    Where a disk tier takes no writes, `kv_disk_refusal` says why.
    """
    values = {metric.name: metric.read(found) for metric in METRICS}
    facts = {name: _value_facts(value) for name, value in values.items() if value is not None}
    disk = found.kv_tiers.disk if found.kv_tiers else None
    return facts | ({"kv_disk_refusal": disk.refusal} if disk and disk.refusal else {})


def _value_facts(value: object) -> object:
    if isinstance(value, HistogramSnapshot):
        shares = {f"p{share}": value.quantile(share / 100) for share in (50, 90, 99)}
        return {"count": value.num_observed, "mean": value.mean, **shares}
    return dict(value) if isinstance(value, Mapping) else value


def _quantiles(histogram: HistogramSnapshot) -> str:
    """Median and 99th percentile in milliseconds."""
    return ", ".join(f"p{share} {(histogram.quantile(share / 100) or 0) * 1e3:.1f} ms" for share in (50, 99))


def _disk(found: DiskMetrics) -> str:
    """The folder of the disk tier, and why it takes no writes if it does not."""
    trouble = {"damaged": found.num_damaged, "errors": found.num_errors}
    counts = "".join(f", {count} {name}" for name, count in trouble.items() if count)
    off = "" if found.takes_writes else f"; nothing is written: {found.refusal}"
    size = f"{format_bytes(found.num_bytes)} of {format_bytes(found.max_bytes)}"
    return f"disk: {found.num_blocks} blocks, {size}, {found.num_evicted} evicted{counts}{off}"


def _speculation(found: SpeculationMetrics) -> str:
    """Drafts and what became of them."""
    share = found.num_accepted_tokens / found.num_draft_tokens
    kinds = "".join(
        f"; {kind} {found.num_accepted_tokens_by_kind[kind]} of {count}"
        for kind, count in sorted(found.num_draft_tokens_by_kind.items())
    )
    return (
        f"speculation: {found.num_draft_tokens} drafts, {share:.0%} accepted; {found.mean_accepted_length:.2f} tokens "
        f"per verification, {found.expected_accepted_length:.2f} expected at an acceptance of "
        f"{found.acceptance_rate:.2f}{kinds}"
    )


def print_batch_stats(done: Sequence[Completion], num_failed: int, seconds: float) -> None:
    """Print counts, throughput and percentiles of latency of a file of prompts, on stderr."""
    tokens = sum(len(choice.token_ids) for one in done for choice in one.choices)
    prompt_tokens = sum(one.prompt_tokens for one in done)
    print_note(
        f"{len(done)} prompts, {num_failed} failed; {prompt_tokens} prompt tokens, {tokens} generated in "
        f"{seconds:.1f} s ({tokens / seconds if seconds else 0:.0f} tokens/s)"
    )
    for title, name in (
        ("first token", "ttft_seconds"),
        ("per token", "tpot_seconds"),
        ("whole request", "e2e_seconds"),
    ):
        values = [value for one in done if (value := getattr(one.metrics, name)) is not None]
        if values:
            print_note(f"{title}: {_percentiles(values)}")


def _percentiles(seconds: Sequence[float]) -> str:
    """Median, 90th and 99th percentile in milliseconds."""
    cuts = quantiles(seconds, n=100, method="inclusive") if len(seconds) > 1 else [seconds[0]] * 99
    return ", ".join(f"p{share} {cuts[share - 1] * 1e3:.1f} ms" for share in (50, 90, 99))
