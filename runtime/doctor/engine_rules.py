"""Rules about the engine and its server, from metrics alone.

Limits are ratios wherever they can be, so that they hold for a model of any size. They are set above what healthy
engines show under load; see the tests, which run both.
"""

from ingot.runtime.doctor.findings import Facts, Finding, Rule
from ingot.runtime.doctor.scrapes import Window

_FEWEST = 8  # requests, without which rates say little


def _finished(window: Window) -> float:
    return window.counted("finished_requests")


def tiers_thrash(facts: Facts) -> Finding | None:
    """Requests are preempted, moved to host memory and back, again and again."""
    window = facts.metrics
    if window is None or _finished(window) < _FEWEST:
        return None
    swaps, finished = window.counted("num_swaps"), _finished(window)
    gaps = window.distribution("inter_token_latency_seconds")
    typical = gaps.quantile(0.5)
    if swaps < 0.25 * finished or not typical or gaps.mean < 1.3 * typical:
        return None
    lost = 1 - typical / gaps.mean
    return Finding(
        "kv-tiers-thrash",
        "first tokens arrive in time, and tokens per second collapse",
        f"the KV pool is too small for the requests that run: {swaps:.0f} times a request was moved to a lower tier and"
        f" back, for {finished:.0f} that ended",
        "give the pool more blocks (--set kv_bytes=...), or let fewer requests run (--set max_sequences=...)",
        0.5 + lost / 2,
        {
            "swaps": swaps,
            "finished_requests": finished,
            "blocks_saved": window.counted("kv_blocks_saved"),
            "blocks_restored": window.counted("kv_blocks_restored"),
            "mean_seconds_between_tokens": gaps.mean,
            "median_seconds_between_tokens": typical,
        },
    )


def pool_is_full(facts: Facts) -> Finding | None:
    """Requests wait because no block is free."""
    window = facts.metrics
    if window is None:
        return None
    waiting, usage = window.now("num_requests_waiting") or 0.0, window.now("kv_cache_usage_perc") or 0.0
    queue, e2e = window.distribution("request_queue_time_seconds"), window.distribution("e2e_request_latency_seconds")
    if waiting < 1 or usage < 0.85:
        return None
    share = queue.mean / e2e.mean if e2e.mean else 1.0
    return Finding(
        "kv-pool-full",
        f"{waiting:.0f} requests wait while {100 * usage:.0f} % of the KV pool is in use",
        "the KV pool holds fewer requests than arrive",
        "give the pool more blocks (--set kv_bytes=...), build with a smaller KV precision, or take fewer requests"
        " (--max-requests, --max-ttft-seconds)",
        0.45 + 0.45 * min(1.0, share),
        {
            "waiting_requests": waiting,
            "running_requests": window.now("num_requests_running") or 0.0,
            "kv_usage": usage,
            "preemptions": window.counted("num_preemptions"),
            "mean_queue_seconds": queue.mean,
        },
    )


def batch_is_full(facts: Facts) -> Finding | None:
    """Requests wait although blocks are free: the batch has no place."""
    window = facts.metrics
    if window is None:
        return None
    waiting, usage = window.now("num_requests_waiting") or 0.0, window.now("kv_cache_usage_perc") or 0.0
    queue, e2e = window.distribution("request_queue_time_seconds"), window.distribution("e2e_request_latency_seconds")
    running = window.now("num_requests_running") or 0.0
    if waiting < max(4.0, 0.5 * running) or usage >= 0.85 or e2e.count < _FEWEST or queue.mean < 0.3 * e2e.mean:
        return None
    return Finding(
        "batch-full",
        f"{waiting:.0f} requests wait while only {100 * usage:.0f} % of the KV pool is in use",
        f"the batch is full: {running:.0f} requests run, and no more may",
        "raise --set max_sequences=... if throughput still grows with it, else add replicas",
        0.4 * min(1.0, queue.mean / e2e.mean) + 0.2,
        {"waiting_requests": waiting, "running_requests": running, "kv_usage": usage, "mean_queue_seconds": queue.mean},
    )


def prompts_share_no_prefix(facts: Facts) -> Finding | None:
    """Prompts have much in common, but not from their first token on."""
    window = facts.metrics
    if window is None:
        return None
    pieces, again = window.counted("prompt_pieces"), window.counted("repeated_prompt_pieces")
    queries, hits = window.counted("prefix_cache_queries"), window.counted("prefix_cache_hits")
    if pieces < 50 or not queries:
        return None
    repeated, hit_rate = again / pieces, hits / queries
    if repeated < 0.4 or hit_rate > 0.4 * repeated:
        return None
    return Finding(
        "prefix-differs",
        f"{100 * repeated:.0f} % of the prompts' text was seen before, and the prefix cache has {100 * hit_rate:.0f} %",
        "what prompts share does not begin at their first token: something that differs comes first, such as a date, an"
        " id or the user's name in the template",
        "move what differs to the end of the prompt; keep system prompt and examples first and equal to the byte",
        0.35 + 0.5 * (repeated - hit_rate),
        {"repeated_share": repeated, "prefix_hit_rate": hit_rate, "prompt_tokens": queries},
    )


def cold_start(facts: Facts) -> Finding | None:
    """A few first tokens took far longer than the rest, and not because requests waited for others."""
    window = facts.metrics
    if window is None:
        return None
    ttft = window.distribution("time_to_first_token_seconds")
    queue, lengths = window.distribution("request_queue_time_seconds"), window.distribution("request_prompt_tokens")
    typical = ttft.quantile(0.5)
    slow = ttft.above(10 * typical)
    if ttft.count < 2 * _FEWEST or not 0 < slow <= max(2.0, 0.1 * ttft.count):
        return None
    longest, usual = lengths.quantile(1.0), lengths.quantile(0.5)
    excess = ttft.total - ttft.count * typical
    beyond_queue = ttft.quantile(1.0) - queue.quantile(1.0)  # the first request did not wait, those after it did
    if beyond_queue < 10 * typical or longest > 5 * usual or excess < 0.3 * ttft.total:
        return None
    return Finding(
        "cold-start",
        f"{slow:.0f} of {ttft.count:.0f} first tokens took more than 10 times as long as the typical one",
        "the first requests pay for what is loaded or compiled on first use; they neither waited nor were longer",
        "send traffic only once /ready answers 200, and warm up what the first requests use (chat template, grammar,"
        " largest batch)",
        0.3 + 0.3 * min(1.0, excess / ttft.total),
        {"slow_first_tokens": slow, "first_tokens": ttft.count, "typical_ttft_seconds": typical,
         "slowest_ttft_seconds": ttft.quantile(1.0), "longest_queue_seconds": queue.quantile(1.0)},
    )  # fmt: skip


def encoding_is_slow(facts: Facts) -> Finding | None:
    """Most of the time to the first token goes into the tokenizer and the template."""
    window = facts.metrics
    if window is None:
        return None
    encoding, ttft = window.distribution("encode_seconds"), window.distribution("time_to_first_token_seconds")
    if encoding.count < _FEWEST or encoding.total < 0.5 * ttft.total or encoding.mean < 0.02:
        return None
    return Finding(
        "slow-encoding",
        f"encoding a prompt takes {encoding.mean:.3f} s of {ttft.mean:.3f} s to its first token",
        "texts are long, or threads that encode wait for processors",
        "send token ids, bound prompts (--max-prompt-tokens), or leave a core to the server (INGOT_THREADS)",
        0.3 + 0.4 * min(1.0, encoding.total / ttft.total),
        {"mean_encode_seconds": encoding.mean, "mean_ttft_seconds": ttft.mean},
    )


def drafts_are_rejected(facts: Facts) -> Finding | None:
    """Speculation computes drafts that are thrown away."""
    window = facts.metrics
    if window is None:
        return None
    drafted, accepted = (
        window.counted("spec_decode_num_draft_tokens"),
        window.counted("spec_decode_num_accepted_tokens"),
    )
    tokens = window.counted("generation_tokens")
    if drafted < 200 or accepted >= 0.15 * drafted or drafted < 0.5 * tokens:
        return None
    return Finding(
        "drafts-rejected",
        f"of {drafted:.0f} drafted tokens {100 * accepted / drafted:.0f} % were accepted",
        "the drafter does not predict this text",
        "serve without --speculate, or with a draft model of the same family",
        0.35,
        {"draft_tokens": drafted, "accepted_tokens": accepted, "generated_tokens": tokens},
    )


def transfers_fail(facts: Facts) -> Finding | None:
    """Blocks are lost between tiers."""
    window = facts.metrics
    failed = window.counted("kv_failed_transfers") if window else 0.0
    if not failed or (facts.machine and facts.machine.after.disk and facts.machine.after.disk.is_full):
        return None  # the full disk is the cause
    return Finding(
        "transfers-fail",
        f"{failed:.0f} blocks did not arrive in their tier",
        "the disk of the KV tier is full or failing",
        "look at the server's log for the system's reason; free space in kv_disk_path, or set kv_disk_bytes lower",
        0.6,
        {"failed_blocks": failed},
    )


def steps_fail(facts: Facts) -> Finding | None:
    """Steps or requests end with errors."""
    window = facts.metrics
    if window is None:
        return None
    steps, requests = window.counted("failed_steps"), window.counted("failed_requests")
    if not steps and not requests:
        return None
    return Finding(
        "steps-fail",
        f"{requests:.0f} requests ended with an error, and {steps:.0f} steps were computed again",
        "the executor raises or computes numbers that are not finite",
        "run `ingot verify` on the artifact on this machine, and look at the log for the first error",
        0.9,
        {"failed_requests": requests, "failed_steps": steps},
    )


def clients_are_slow(facts: Facts) -> Finding | None:
    """Clients do not read their answers."""
    window = facts.metrics
    slow = window.counted("slow_clients") if window else 0.0
    if not window or slow < max(3.0, 0.05 * _finished(window)):
        return None
    return Finding(
        "slow-clients",
        f"{slow:.0f} requests were aborted because their client accepted nothing for --send-seconds",
        "clients or a proxy in between stop reading while tokens are generated for them",
        "look for a proxy that buffers event streams; lower --send-seconds so that their blocks are freed sooner",
        0.3,
        {"slow_clients": slow, "finished_requests": _finished(window)},
    )


def requests_are_refused(facts: Facts) -> Finding | None:
    """More work arrives than the server takes; what limits it may be another finding."""
    window = facts.metrics
    if window is None:
        return None
    refused, finished = window.counted("turned_away"), _finished(window)
    if refused < max(_FEWEST, 0.05 * (refused + finished)):
        return None
    return Finding(
        "overload",
        f"{refused:.0f} requests got 429, {finished:.0f} were served",
        "more work arrives than this replica serves",
        "add replicas; see the other findings for what limits this one",
        0.25 * refused / (refused + finished),
        {"refused_requests": refused, "finished_requests": finished},
    )


def descriptors_run_out(facts: Facts) -> Finding | None:
    """The server is about to be unable to accept connections."""
    window = facts.metrics
    opened = window.now("process_open_fds") if window else None
    most = window.now("process_max_fds") if window else None
    if not opened or not most or opened < 0.8 * most:
        return None
    return Finding(
        "open-files",
        f"the server has {opened:.0f} of {most:.0f} files and connections open",
        "the limit of open files is too low for the connections that it keeps",
        "raise it: `ulimit -n 65536`, LimitNOFILE= in systemd, or a container's ulimits",
        0.75,
        {"open_files": opened, "most_open_files": most},
    )


def threads_exceed_cores(facts: Facts) -> Finding | None:
    """The engine computes with more threads than it has processors; they wait for one another at each barrier."""
    window = facts.metrics
    threads, cores = (window.now("compute_threads"), window.now("usable_cores")) if window else (None, None)
    if threads is None and facts.machine:
        threads, cores = facts.machine.after.threads, facts.machine.after.cores
    if not threads or not cores or threads <= cores + 0.01:
        return None
    return Finding(
        "threads-over-cores",
        f"the engine computes with {threads:.0f} threads on {cores:g} processors",
        "INGOT_THREADS, or the machine's cores, exceed the affinity or the quota of this process",
        f"set INGOT_THREADS={max(1, int(cores))}, or give the container more processors",
        0.7 + 0.2 * (1 - cores / threads),
        {"threads": threads, "usable_cores": cores},
    )


ENGINE_RULES: tuple[Rule, ...] = (
    tiers_thrash,
    pool_is_full,
    batch_is_full,
    prompts_share_no_prefix,
    cold_start,
    encoding_is_slow,
    drafts_are_rejected,
    transfers_fail,
    steps_fail,
    clients_are_slow,
    requests_are_refused,
    descriptors_run_out,
    threads_exceed_cores,
)
