"""Figures about generated text for `ingot run`: of one completion, of many, and of the engine."""

from collections.abc import Sequence
from statistics import quantiles

from ingot.cli.console import print_note
from ingot.runtime import Completion, Engine
from ingot.runtime.speculation.counters import SpeculationMetrics


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
    mean = {} if done.mean_logprob is None else {"mean_logprob": done.mean_logprob}
    return {
        "index": done.index,
        "text": done.text,
        "token_ids": list(done.token_ids),
        "finish_reason": done.finish_reason,
        "seed": done.seed,
        **mean,
        "prompt_tokens": done.prompt_tokens,
        "cached_tokens": done.cached_tokens,
        "ttft_seconds": done.metrics.ttft_seconds,
        "tpot_seconds": done.metrics.tpot_seconds,
        "e2e_seconds": done.metrics.e2e_seconds,
    }


def print_stats(engine: Engine) -> None:
    """Print what the engine computed so far, on stderr."""
    found = engine.metrics()
    print_note(
        f"engine: {found.num_steps} steps, {found.computed_tokens} tokens computed, {found.prefix_hit_tokens} from the "
        f"prefix cache, {found.output_tokens} generated; {found.num_preemptions} preemptions; {found.blocks_total} KV "
        f"blocks, {found.blocks_cached} cached"
    )
    if found.speculation and found.speculation.num_drafts:
        print_note(_speculation(found.speculation))


def _speculation(found: SpeculationMetrics) -> str:
    """Drafts and what became of them."""
    share = found.num_accepted_tokens / found.num_draft_tokens
    return (
        f"speculation: {found.num_draft_tokens} drafts, {share:.0%} accepted; {found.mean_accepted_length:.2f} tokens "
        f"per verification, {found.expected_accepted_length:.2f} expected at an acceptance of "
        f"{found.acceptance_rate:.2f}"
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
