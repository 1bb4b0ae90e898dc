"""Rules about the engine and its server, from metrics alone.

Limits are ratios wherever they can be, so that they hold for a model of any size. They are set above what healthy
engines show under load; see the tests, which run both.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from ingot.runtime.doctor.findings import Finding, ObservedFacts, Rule, engine_cores, engine_threads
from ingot.runtime.doctor.request_time import engine_seconds
from ingot.runtime.doctor.scrapes import ScrapeWindow
from ingot.sizes import format_bytes

_FEWEST = 8  # requests, without which rates say little
_FEWEST_PIECES = 50  # of prompts
# With this share of the weights in huge pages, the rest costs little.
_HUGE_SHARE = 0.8
_LEAST_SLOW_SHARE = 0.2


def _finished(window: ScrapeWindow) -> float:
    return window.counted("finished_requests")


def tiers_thrash(facts: ObservedFacts) -> Finding | None:
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


def pool_is_full(facts: ObservedFacts) -> Finding | None:
    """Requests wait because no block is free."""
    window = facts.metrics
    if window is None or tiers_thrash(facts):
        return None  # thrashing is a full pool, and names what it costs
    waits, usage = _Waits.of(window, "pool_full_steps"), window.now("kv_cache_usage_perc") or 0.0
    if not (waits.are_long or (waits.waiting >= 1 and usage >= _FULL_POOL)):
        return None
    return Finding(
        "kv-pool-full",
        f"{waits.text} while {100 * usage:.0f} % of the KV pool is in use" if usage >= _FULL_POOL else waits.text,
        "the KV pool holds fewer requests than arrive",
        "give the pool more blocks (--set kv_bytes=...), build with a smaller KV precision, or take fewer requests"
        " (--max-requests, --max-ttft-seconds)",
        0.45 + 0.45 * waits.share,
        {"kv_usage": usage, "preemptions": window.counted("num_preemptions"), **waits.numbers},
    )


def slow_part_is_read(facts: ObservedFacts) -> Finding | None:
    """Steps take longer because they read keys and values in the slow part of the KV pool."""
    window = facts.metrics
    busy = engine_seconds(window) if window else 0.0
    if window is None or not busy:
        return None
    read = window.counted("kv_slow_read_seconds")
    share = min(1.0, read / busy)
    if share < _LEAST_SLOW_SHARE:
        return None
    return Finding(
        "kv-slow-part",
        f"steps spend {100 * share:.0f} % of their time on reading the slow part of the KV pool",
        "conversations are longer than the fast part of the pool: a step reads all of their keys and values",
        "give the fast part more (--set kv_bytes=...), build with a smaller KV precision, take shorter or fewer"
        " requests, put kv_offload_path on a faster disk, or let them wait instead (--set kv_offload=off)",
        0.3 + 0.6 * share,
        {
            "slow_read_seconds": read,
            "engine_seconds": busy,
            "slow_blocks": window.now("kv_slow_blocks") or 0.0,
            "slow_blocks_in_use": window.now("kv_slow_blocks_in_use") or 0.0,
        },
    )


def batch_is_full(facts: ObservedFacts) -> Finding | None:
    """Requests wait although blocks are free: the batch has no place."""
    window = facts.metrics
    if window is None:
        return None
    waits, usage = _Waits.of(window, "batch_full_steps"), window.now("kv_cache_usage_perc") or 0.0
    counts_steps = window.now("batch_full_steps") is not None
    is_seen = waits.waiting >= max(4.0, 0.5 * waits.running) and usage < _FULL_POOL and not counts_steps
    if waits.requests < _FEWEST or waits.share < 0.3 or not (waits.are_long or is_seen):
        return None
    return Finding(
        "batch-full",
        f"{waits.text} although blocks of the KV pool are free",
        "the batch is full: as many requests run as max_sequences allows",
        "raise --set max_sequences=... if throughput still grows with it, else add replicas",
        0.2 + 0.4 * waits.share,
        {"kv_usage": usage, **waits.numbers},
    )


_FULL_POOL = 0.85  # share of the blocks; the rest is often too little for one more prompt


@dataclass(frozen=True)
class _Waits:
    """How long requests waited for their first step, and at what share of the steps for one cause.

    `waiting` and `running` are at the end, when a load may be over; all else is of the whole window.
    """

    waiting: float
    running: float
    requests: float
    queue_seconds: float
    share: float  # of the time from arrival to the end
    steps_share: float

    @classmethod
    def of(cls, window: ScrapeWindow, cause: str) -> Self:
        queue = window.distribution("request_queue_time_seconds")
        whole, steps = window.distribution("e2e_request_latency_seconds"), window.counted("steps")
        waiting = window.now("num_requests_waiting") or 0.0
        return cls(
            waiting=waiting,
            running=window.now("num_requests_running") or 0.0,
            requests=whole.count,
            queue_seconds=queue.mean,
            share=min(1.0, queue.mean / whole.mean) if whole.mean else float(waiting > 0),
            steps_share=window.counted(cause) / steps if steps else 0.0,
        )

    @property
    def are_long(self) -> bool:
        """Whether requests waited for a good part of their time, and this cause was there at many of the steps."""
        return self.requests >= _FEWEST and self.share >= 0.3 and self.steps_share >= 0.3

    @property
    def text(self) -> str:
        if self.waiting >= 1:
            return f"{self.waiting:.0f} requests wait"
        return f"requests waited for {self.queue_seconds:.3g} s, {100 * self.share:.0f} % of their time,"

    @property
    def numbers(self) -> dict[str, float]:
        return {
            "waiting_requests": self.waiting,
            "running_requests": self.running,
            "mean_queue_seconds": self.queue_seconds,
            "queue_share": self.share,
            "share_of_steps": self.steps_share,
        }


def prompts_share_no_prefix(facts: ObservedFacts) -> Finding | None:
    """Prompts have much in common, but not from their first token on."""
    return _missed_by_prefix_cache(
        facts,
        "prefix-differs",
        lambda window: window.counted("repeated_prompt_pieces") - window.counted("leading_prompt_pieces"),
        "of the prompts' text was seen before, after what was not",
        "what prompts share does not begin at their first token: something that differs comes first, such as a date, an"
        " id or the user's name in the template",
        "move what differs to the end of the prompt; keep system prompt and examples first and equal to the byte",
    )


def prefixes_are_lost(facts: ObservedFacts) -> Finding | None:
    """Prompts begin as earlier ones did, and the prefix cache no longer has what they share."""
    return _missed_by_prefix_cache(
        facts,
        "prefix-lost",
        lambda window: window.counted("leading_prompt_pieces"),
        "of the prompts' text begins as earlier prompts did",
        "blocks are evicted before their prefix comes again, or requests with another cache_salt or adapter share none",
        "give the KV pool more memory (kv_bytes), or a tier in host memory (kv_host_bytes) or on disk (kv_disk_path)",
    )


def _missed_by_prefix_cache(
    facts: ObservedFacts, name: str, count: Callable[[ScrapeWindow], float], seen: str, cause: str, action: str
) -> Finding | None:
    """Much of the prompts' pieces is among those that `count` counts, and the prefix cache has far less."""
    window = facts.metrics
    if window is None:
        return None
    pieces, queries = window.counted("prompt_pieces"), window.counted("prefix_cache_queries")
    if pieces < _FEWEST_PIECES or not queries or window.now("prefix_cache_enabled") == 0:
        return None
    repeated, hit_rate = count(window) / pieces, window.counted("prefix_cache_hits") / queries
    if repeated < 0.4 or hit_rate > 0.4 * repeated:
        return None
    return Finding(
        name,
        f"{100 * repeated:.0f} % {seen}, and the prefix cache has {100 * hit_rate:.0f} %",
        cause,
        action,
        0.35 + 0.5 * (repeated - hit_rate),
        {"repeated_share": repeated, "prefix_hit_rate": hit_rate, "prompt_tokens": queries},
    )


def cold_start(facts: ObservedFacts) -> Finding | None:
    """A few first tokens took far longer than the rest, and not because requests waited for others."""
    window = facts.metrics
    if window is None or window.counted_before("time_to_first_token_seconds_count") >= _FEWEST:
        return None  # the first requests were served before: the server is warm
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


def encoding_is_slow(facts: ObservedFacts) -> Finding | None:
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


def drafts_are_rejected(facts: ObservedFacts) -> Finding | None:
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


def transfers_fail(facts: ObservedFacts) -> Finding | None:
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


def steps_fail(facts: ObservedFacts) -> Finding | None:
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


def clients_are_slow(facts: ObservedFacts) -> Finding | None:
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
        0.4 + 0.5 * slow / (slow + _finished(window)),
        {"slow_clients": slow, "finished_requests": _finished(window)},
    )


def requests_are_refused(facts: ObservedFacts) -> Finding | None:
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


def descriptors_run_out(facts: ObservedFacts) -> Finding | None:
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


def threads_exceed_cores(facts: ObservedFacts) -> Finding | None:
    """The engine computes with more threads than it has processors; they wait for one another at each barrier."""
    threads, cores = engine_threads(facts), engine_cores(facts)
    if not threads or not cores or threads <= cores + 0.01:
        return None
    return Finding(
        "threads-over-cores",
        f"the engine computes with {threads:.0f} threads on {cores:g} processors",
        "INGOT_THREADS, or the machine's cores, exceed the affinity or the quota of this process",
        f"set INGOT_THREADS or num_threads to {max(1, int(cores))}, or give the service more processors",
        0.7 + 0.2 * (1 - cores / threads),
        {"threads": threads, "usable_cores": cores},
    )


def engine_fails(facts: ObservedFacts) -> Finding | None:
    """The engine failed and was loaded again, or is not any more."""
    window = facts.metrics
    if window is None:
        return None
    lately, ever = window.counted("engine_restarts"), window.now("engine_restarts") or 0.0
    is_down = window.now("ready") == 0 and ever > 0
    if not lately and not is_down:
        return None
    action = "read the server's log, which names the cause (such as too little memory)"
    return Finding(
        "engine-down" if is_down else "engine-restarts",
        "the server takes no requests, and its engine has failed" if is_down else "requests end with 503",
        f"the engine's process died or failed, and was loaded again {ever:.0f} times",
        f"{action}; then restart the server or POST /admin/reload" if is_down else action,
        0.99 if is_down else 0.9,
        {"restarts": lately, "restarts_since_start": ever},
    )


def weights_are_in_small_pages(facts: ObservedFacts) -> Finding | None:
    """A step reads all weights, in pages of 4 KiB."""
    window = facts.metrics
    weights = (window.now("weight_bytes") if window else None) or 0.0
    huge = (window.now("weight_huge_bytes") if window else None) or 0.0
    if huge >= _HUGE_SHARE * weights:
        return None
    return Finding(
        "small-pages",
        f"{format_bytes(weights - huge)} of {format_bytes(weights)} of weights are in pages of 4 KiB",
        "other processes use the file, or the system has no huge pages for it; the log says which when it loads",
        "load it again while nothing else has the file mapped, or copy the weights (--set weights=copied)",
        0.3 * (1 - huge / weights),
        {"weight_bytes": weights, "weight_huge_bytes": huge},
    )


ENGINE_RULES: tuple[Rule, ...] = (
    engine_fails,
    tiers_thrash,
    pool_is_full,
    slow_part_is_read,
    batch_is_full,
    prompts_share_no_prefix,
    prefixes_are_lost,
    cold_start,
    encoding_is_slow,
    drafts_are_rejected,
    transfers_fail,
    steps_fail,
    clients_are_slow,
    requests_are_refused,
    descriptors_run_out,
    threads_exceed_cores,
    weights_are_in_small_pages,
)
