"""Rules about the time of requests and about clients: which part of the time is lost, and what binds it."""

from ingot.runtime.doctor.engine_rules import cold_start, pool_is_full, tiers_thrash
from ingot.runtime.doctor.findings import Finding, ObservedFacts, Rule, engine_cores, engine_threads
from ingot.runtime.doctor.request_time import RequestTime, engine_seconds, is_bursty
from ingot.runtime.doctor.scrapes import ScrapeWindow

_FEWEST = 8  # requests
_FEWEST_PIECES = 50
_FEWEST_READS = 4  # blocks that the disk tier read, and prefixes computed instead
_SMALL_CHUNK = 128  # tokens: a step of fewer reads all weights for little work
_STEPS_OF_A_PROMPT = 8
_STANDSTILL_SECONDS = 0.1
_STALL_SECONDS = 0.1  # between two tokens: readers see it
_UNEVEN = 10.0  # P99 to P50
_OTHER_PATHS = {"/metrics", "/health", "/ready", "/version"}
_REASONS = {
    "400": "their bodies ask for what the server does not take: the error of each names the field",
    "401": "they have no API key that the server knows",
    "403": "their key, host or origin is not allowed",
    "404": "they name a path or a model that is not served",
    "408": "their bodies arrive too slowly",
    "413": "their bodies are too long",
}


def clients_leave(facts: ObservedFacts) -> Finding | None:
    """Clients leave before their answers end."""
    window = facts.metrics
    left = window.counted("clients_left") if window else 0.0
    if window is None or left < max(4.0, 0.08 * window.counted("finished_requests")):
        return None
    time, whole = RequestTime.of(window), window.distribution("e2e_request_latency_seconds")
    share = left / max(left, window.counted("finished_requests"))
    part = "before a first token" if time.share(time.unstarted) > 0.5 else "while tokens came"
    return Finding(
        "clients-leave",
        f"the clients of {left:.0f} requests left before the end of their answer, most {part}",
        f"timeouts of clients, or of a proxy, are shorter than answers take: requests end after {whole.mean:.2g} s"
        " on average; what was computed for them is lost",
        "raise the timeouts of clients above the P99 of answers, stream, lower max_tokens, or refuse at once what comes"
        " too late (--max-ttft-seconds)",
        0.35 + 0.5 * share,
        {
            "clients_left": left,
            "finished_requests": window.counted("finished_requests"),
            "mean_e2e_seconds": whole.mean,
        },
    )


def answers_are_errors(facts: ObservedFacts) -> Finding | None:
    """Many requests get an error of the client's kind; 429 and clients that left have rules of their own."""
    window = facts.metrics
    if window is None:
        return None
    answers = _answers(window)
    errors = {
        status: number for status, number in answers.items() if status[:1] == "4" and status not in ("429", "499")
    }
    total, number = sum(answers.values()), sum(errors.values())
    if number < max(float(_FEWEST), 0.1 * total):
        return None
    most = max(errors, key=lambda status: errors[status])
    return Finding(
        "client-errors",
        f"{number:.0f} of {total:.0f} answers are errors of the request, most with status {most}",
        f"{errors[most]:.0f} requests got {most}: {_REASONS.get(most, 'the message of each answer says why')}",
        "read the message of one such answer, or the log of --log-requests, which names code and key; mend the client",
        0.3 + 0.5 * number / total,
        {"errors": number, "answers": total, f"status_{most}": errors[most]},
    )


def _answers(window: ScrapeWindow) -> dict[str, float]:
    """Answers by status, without those that only watch the server."""
    found: dict[str, float] = {}
    for (path, status), number in window.counted_by("http_answers", "path", "status").items():
        if path not in _OTHER_PATHS:
            found[status] = found.get(status, 0.0) + number
    return found


def chunks_are_small(facts: ObservedFacts) -> Finding | None:
    """Prompts are computed in many small steps."""
    window = facts.metrics
    most = window.now("max_batch_tokens") if window else None
    if window is None or not most or most >= _SMALL_CHUNK:
        return None
    time, tokens = RequestTime.of(window), window.distribution("request_prompt_tokens").mean
    share = time.share(time.prefill)
    if tokens < _STEPS_OF_A_PROMPT * most or share < 0.3:
        return None
    return Finding(
        "small-chunks",
        f"prefill takes {100 * share:.0f} % of the time of requests, in {tokens / most:.0f} steps a prompt",
        f"max_batch_tokens is {most:.0f}: each step reads all weights for as few tokens",
        "raise it (--set max_batch_tokens=512), as far as gaps between tokens of other requests may grow",
        0.4 + 0.4 * share,
        {"max_batch_tokens": most, "mean_prompt_tokens": tokens, "prefill_share": share},
    )


def prompts_interrupt_streams(facts: ObservedFacts) -> Finding | None:
    """Steps that compute prompts take far longer than the others, and streams wait for them."""
    window = facts.metrics
    if window is None:
        return None
    gaps, steps = window.distribution("inter_token_latency_seconds"), window.distribution("prefill_step_seconds")
    plain, typical, busy = window.distribution("decode_step_seconds"), gaps.quantile(0.5), engine_seconds(window)
    has_company = window.distribution("step_sequences").mean >= 1.5
    if gaps.count < 50 or not typical or not busy or not plain.count or not has_company:
        return None
    lost = 1 - gaps.count * typical / gaps.total if gaps.total else 0.0
    ratio = steps.mean / plain.quantile(0.5)
    if (
        lost < 0.3
        or gaps.p99_ratio < _UNEVEN
        or ratio < _UNEVEN
        or steps.total < 0.3 * busy
        or steps.mean < _STALL_SECONDS
    ):
        return None
    most = window.now("max_batch_tokens") or 0.0
    return Finding(
        "prompts-interrupt-streams",
        f"gaps between tokens are {gaps.p99_ratio:.0f} times the usual at P99: streams stall for prompts",
        f"a step with prompts takes {1e3 * steps.mean:.3g} ms, one without {1e3 * plain.quantile(0.5):.3g} ms, and all"
        " running streams wait for it",
        f"lower max_batch_tokens (now {most:.0f}), so that prompts are computed in smaller chunks; or give long prompts"
        " a replica of their own",
        0.25 + 0.25 * lost,  # what makes prompts long or slow is found by other rules
        {"lost_share_of_gaps": lost, "prefill_step_seconds": steps.mean, "decode_step_seconds": plain.quantile(0.5),
         "p99_to_p50": gaps.p99_ratio, "max_batch_tokens": most},
    )  # fmt: skip


def engine_stands_still(facts: ObservedFacts) -> Finding | None:
    """Some steps take far longer than others of their kind, which no work explains."""
    window = facts.metrics
    busy = engine_seconds(window) if window else 0.0
    if window is None or not busy:
        return None
    prompts = window.distribution("request_prompt_tokens")
    lengths = prompts.quantile(1.0) / prompts.quantile(0.5) if prompts.count else 1.0
    number = lost = longest = 0.0
    for kind, ratio in (("prefill", lengths), ("decode", 1.0)):  # longer prompts explain longer steps
        steps = window.distribution(f"{kind}_step_seconds")
        limit = max(_STANDSTILL_SECONDS, 20 * ratio * steps.quantile(0.5))
        number, lost = number + steps.above(limit), lost + steps.seconds_above(limit)
        longest = max(longest, steps.quantile(1.0))
    if number < 2 or lost < 0.15 * busy:
        return None
    return Finding(
        "engine-stands-still",
        f"{number:.0f} steps took more than 20 times as long as the usual one, together at least {lost:.2g} s",
        "the engine's process stood still: it was stopped (a debugger, a freezer, a snapshot of the virtual machine),"
        " or waited for memory or a disk",
        "look at the host for what stops processes: steal time, cgroup freezer, `dmesg`, live migration",
        0.5 + 0.4 * lost / busy,
        {"slow_steps": number, "lost_seconds": lost, "longest_step_seconds": longest, "engine_seconds": busy},
    )


def threads_are_few(facts: ObservedFacts) -> Finding | None:
    """The engine computes all the time with at most half of the processors that it may use."""
    window, threads, cores = facts.metrics, engine_threads(facts), engine_cores(facts)
    if window is None or not threads or not cores:
        return None
    busy = RequestTime.of(window).busy_share
    all_threads = ScrapeWindow(window.before, window.after).now("compute_threads") or threads
    if busy is None or busy < 0.8 or all_threads > cores / 2:
        return None
    return Finding(
        "threads-under-cores",
        f"the engine computes {100 * busy:.0f} % of the time, with {threads:.0f} thread(s) on {cores:g} processors",
        "num_threads or INGOT_THREADS is below what the process may use",
        f"set num_threads or INGOT_THREADS up to {int(cores)}, unless the others are meant for something else",
        0.2 + 0.3 * (1 - all_threads / cores),
        {"threads": all_threads, "usable_cores": cores, "busy_share": busy},
    )


def traffic_is_bursty(facts: ObservedFacts) -> Finding | None:
    """Requests wait for each other, and later the engine idles."""
    window = facts.metrics
    if window is None or not is_bursty(time := RequestTime.of(window)):
        return None
    share, busy = time.share(time.queue), time.busy_share or 0.0
    return Finding(
        "bursts",
        f"requests wait for {100 * share:.0f} % of their time, and the engine computes {100 * busy:.0f} % of the time",
        "requests arrive in bursts: the mean rate fits this replica, its peaks do not",
        "spread arrivals (jitter in clients, a queue before the server), or raise max_sequences and kv_bytes to the"
        " peak; further replicas would idle as well",
        0.3 + 0.5 * share,
        {"queue_share": share, "busy_share": busy, "requests": time.requests},
    )


def clients_read_slowly(facts: ObservedFacts) -> Finding | None:
    """Answers wait for clients that read more slowly than tokens come."""
    window = facts.metrics
    if window is None or not window.seconds:
        return None
    waiting, answers = window.counted("send_seconds") / window.seconds, window.now("open_requests") or 0.0
    if waiting < max(1.0, 0.3 * answers):
        return None
    return Finding(
        "slow-readers",
        f"{waiting:.1f} answers at a time waited for their client to accept what was written",
        "clients, or a proxy in between, read more slowly than tokens come; their answers stay in memory",
        "look at the clients' networks and at proxies that buffer; lower --send-seconds to end those that stop reading,"
        " or raise --stream-seconds for fewer and larger events",
        0.3 + 0.3 * min(1.0, waiting / max(1.0, answers)),
        {"waiting_answers": waiting, "open_requests": answers},
    )


def pool_preempts(facts: ObservedFacts) -> Finding | None:
    """Running requests are preempted for the blocks of others, and wait again."""
    window = facts.metrics
    if window is None or tiers_thrash(facts) or pool_is_full(facts):
        return None
    time, preempted = RequestTime.of(window), window.counted("num_preemptions")
    share, finished = time.share(time.paused), window.counted("finished_requests")
    is_urgent = window.counted("num_yields") > 0.5 * preempted
    if is_urgent or finished < _FEWEST or (share < 0.15 and preempted < 0.5 * finished):
        return None
    return Finding(
        "kv-pool-preempts",
        f"{preempted:.0f} times a running request was preempted, and waited; {finished:.0f} ended",
        "the KV pool is too small for the answers that grow in it: what was computed for a preempted one is computed"
        " again",
        "give the pool more blocks (--set kv_bytes=...), a tier in host memory (kv_host_bytes), or let fewer requests"
        " run (--set max_sequences=...)",
        0.4 + 0.5 * share,
        {"preemptions": preempted, "finished_requests": finished, "paused_share": share},
    )


def prefix_cache_is_off(facts: ObservedFacts) -> Finding | None:
    """Prompts begin alike, and nothing of them is kept."""
    window = facts.metrics
    if window is None or window.now("prefix_cache_enabled") != 0:
        return None
    pieces = window.counted("prompt_pieces")
    shared = window.counted("leading_prompt_pieces") / pieces if pieces >= _FEWEST_PIECES else 0.0
    if shared < 0.4:
        return None
    return Finding(
        "prefix-cache-off",
        f"{100 * shared:.0f} % of the prompts' text begins as earlier prompts did, and is computed each time",
        "the prefix cache is off",
        "turn it on (--set prefix_cache=true)",
        0.6 + 0.3 * shared,
        {"repeated_share": shared},
    )


def answers_fill_the_context(facts: ObservedFacts) -> Finding | None:
    """Answers end with the context: max_tokens bounds none of them."""
    window = facts.metrics
    context = window.now("context_tokens") if window else None
    if window is None or not context:
        return None
    reasons = window.counted_by("request_success", "finished_reason")
    answers = window.distribution("request_generation_tokens")
    ended, cut = sum(reasons.values()), reasons.get(("length",), 0.0)
    used = answers.mean + window.distribution("request_prompt_tokens").mean
    if ended < 2 or cut < 0.7 * ended or used < 0.7 * context or answers.mean < 0.5 * context:
        return None
    return Finding(
        "answers-fill-context",
        f"{cut:.0f} of {ended:.0f} answers ended with the model's context, after {answers.mean:.0f} tokens on average",
        "max_tokens is not set or far too large, and the model does not end by itself: each answer keeps its place and"
        " its KV blocks to the last token",
        "set max_tokens to what clients use, add stop strings or the chat template, or bound it for all"
        " (--max-output-tokens)",
        0.4 + 0.4 * cut / ended,
        {"cut_answers": cut, "answers": ended, "mean_answer_tokens": answers.mean, "context_tokens": context},
    )


def disk_tier_is_slow(facts: ObservedFacts) -> Finding | None:
    """To read a block from the disk tier takes longer than to compute it."""
    window = facts.metrics
    read = window.now("kv_disk_block_seconds") if window else None
    if window is None or not read:
        return None
    prompts, computed = window.distribution("prefill_step_seconds").total, window.counted("computed_tokens")
    block = (window.now("kv_block_tokens") or 0.0) * prompts / computed if computed else 0.0
    recomputed, used = window.counted("kv_recomputed_prefixes"), window.counted("kv_disk_blocks_read")
    if recomputed + used < _FEWEST_READS or not block or read < block:
        return None
    return Finding(
        "slow-disk-tier",
        f"a block takes {1e3 * read:.3g} ms from the disk tier, and about {1e3 * block:.3g} ms to compute",
        f"the disk is too slow for this model: {recomputed:.0f} stored prefixes were computed again, {used:.0f} blocks"
        " were waited for",
        "put kv_disk_path on a faster disk, give host memory more (kv_host_bytes), or serve without the disk tier"
        " (kv_disk_bytes=0)",
        0.4 + 0.3 * (1 - block / read),
        {"seconds_per_read": read, "seconds_per_block": block, "recomputed_prefixes": recomputed, "blocks_read": used},
    )


def first_tokens_are_uneven(facts: ObservedFacts) -> Finding | None:
    """The slowest first tokens take over 10 times as long as the usual one."""
    window = facts.metrics
    ttft = window.distribution("time_to_first_token_seconds") if window else None
    if window is None or ttft is None or ttft.count < 50 or ttft.p99_ratio < _UNEVEN or cold_start(facts):
        return None
    excess = 1 - ttft.count * ttft.quantile(0.5) / ttft.total
    if excess < 0.3 or ttft.quantile(0.99) < 0.1:
        return None
    prompts, queue = window.distribution("request_prompt_tokens"), window.distribution("request_queue_time_seconds")
    if prompts.p99_ratio >= 8:
        cause = f"lengths are mixed: the longest prompts are {prompts.p99_ratio:.0f} times the usual ones"
        action = "give long prompts a replica or a lower priority, or lower max_batch_tokens"
    elif queue.quantile(0.99) > 0.5 * ttft.quantile(0.99):
        cause, action = (
            "some requests wait in the queue while others do not",
            "see the parts of the time for what binds",
        )
    else:
        cause, action = "some prefills take far longer than others of their length", "look at the host while it happens"
    return Finding(
        "uneven-latency",
        f"P99 of the time to a first token is {ttft.p99_ratio:.0f} times its P50",
        cause,
        action,
        0.15 + 0.2 * excess,
        {
            "p99_seconds": ttft.quantile(0.99),
            "p50_seconds": ttft.quantile(0.5),
            "prompt_p99_to_p50": prompts.p99_ratio,
        },
    )


TRAFFIC_RULES: tuple[Rule, ...] = (
    clients_leave,
    answers_are_errors,
    chunks_are_small,
    prompts_interrupt_streams,
    engine_stands_still,
    threads_are_few,
    traffic_is_bursty,
    clients_read_slowly,
    pool_preempts,
    prefix_cache_is_off,
    answers_fill_the_context,
    disk_tier_is_slow,
    first_tokens_are_uneven,
)
