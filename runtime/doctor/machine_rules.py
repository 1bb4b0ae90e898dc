"""Rules about the machine on which the engine runs."""

from ingot.runtime.doctor.findings import Finding, ObservedFacts, Rule, engine_cores, engine_threads
from ingot.runtime.doctor.scrapes import ScrapeWindow
from ingot.sizes import format_bytes

_SPARE_FILES = 64  # of the process itself: libraries, logs, the artifact


def neighbours_are_busy(facts: ObservedFacts) -> Finding | None:
    """Other processes use processors that the engine computes with."""
    machine, window = facts.machine, facts.metrics
    if machine is None or machine.busy_cores is None:
        return None
    own = (machine.after.own_seconds or 0.0) - (machine.before.own_seconds or 0.0)
    if window:
        server = ScrapeWindow(window.before, window.after)  # with the processes of all its models
        own += server.counted("process_cpu_seconds") + server.counted("engine_cpu_seconds")
    others = machine.busy_cores - own / machine.seconds
    threads = engine_threads(facts) or 0.0
    spare = max(0.0, machine.after.all_cores - threads)
    if others < spare + 0.4:
        return None
    return Finding(
        "busy-neighbours",
        f"other processes keep {others:.1f} of {machine.after.all_cores} processors busy",
        "threads wait for one another at the end of each matmul, so one that lost its processor delays all",
        "move the neighbours, or give the engine cores of its own (--set cpu_affinity=..., cpuset of the container)",
        0.5 + 0.4 * min(1.0, others / machine.after.all_cores),
        {"other_processors": others, "processors": machine.after.all_cores, "engine_threads": threads},
    )


def quota_is_used_up(facts: ObservedFacts) -> Finding | None:
    """The control group is stopped in many of its periods."""
    share, threads, cores = _throttled_share(facts), engine_threads(facts), engine_cores(facts)
    if share < 0.1 or not threads or not cores or threads > cores:
        return None  # more threads than cores are a finding of their own
    return Finding(
        "cpu-quota",
        f"the service or its container was stopped in {100 * share:.0f} % of its scheduling periods",
        "its processor quota is used up before a period ends, and the engine stands still until the next",
        "raise the limit of processors (CPUQuota= in systemd), or remove it and set a request alone",
        0.5 + 0.4 * share,
        {"throttled_share": share, "usable_cores": cores},
    )


def _throttled_share(facts: ObservedFacts) -> float:
    """Of the server's own control groups where it reports them: this process may be in others."""
    window = facts.metrics
    if window is None or window.now("quota_periods") is None:
        return facts.machine.throttled_share if facts.machine else 0.0
    periods = window.counted("quota_periods")
    return window.counted("throttled_periods") / periods if periods else 0.0


def memory_is_swapped(facts: ObservedFacts) -> Finding | None:
    """Pages move between memory and swap while the engine works."""
    machine = facts.machine
    rate = machine.swapped_pages_per_second if machine else 0.0
    if rate < 20:
        return None
    return Finding(
        "swap",
        f"{rate:.0f} pages a second are swapped",
        "weights, KV blocks and other processes need more memory than there is",
        "give less to the KV cache (--set kv_bytes=..., kv_host_bytes=...), or turn swap off for this service",
        0.92,
        {
            "swapped_pages_per_second": rate,
            "free_memory_bytes": float((machine and machine.after.free_memory_bytes) or 0),
        },
    )


def clocks_are_low(facts: ObservedFacts) -> Finding | None:
    """Busy cores run far below their highest clock."""
    machine = facts.machine
    share = machine.after.clock_share if machine else None
    if machine is None or share is None or share >= 0.6 or (machine.busy_cores or 0.0) < 0.5 * machine.after.cores:
        return None  # idle cores rest
    return Finding(
        "low-clocks",
        f"busy cores run at {100 * share:.0f} % of their highest clock",
        "the governor saves power, or the processor is too hot or capped",
        "set the governor (`cpupower frequency-set -g performance`); look at temperatures and power caps",
        0.4 + 0.5 * (1 - share),
        {"clock_share": share, "busy_processors": machine.busy_cores or 0.0},
    )


def disk_is_full(facts: ObservedFacts) -> Finding | None:
    """The disk tier has no room."""
    disk = facts.machine.after.disk if facts.machine else None
    if disk is None or not disk.is_full:
        return None
    failed = facts.metrics.counted("kv_failed_transfers") if facts.metrics else 0.0
    return Finding(
        "disk-full",
        f"the file system of {disk.path} has {format_bytes(disk.free_bytes)} free of {format_bytes(disk.total_bytes)}",
        "the disk of the KV tier is full: blocks that leave memory are lost and computed again",
        "free space there, name another folder (--set kv_disk_path=...), or set kv_disk_bytes lower",
        0.65,
        {"free_bytes": disk.free_bytes, "total_bytes": disk.total_bytes, "failed_blocks": failed},
    )


def link_is_narrow(facts: ObservedFacts) -> Finding | None:
    """A GPU has fewer PCI Express lanes than it could have."""
    links = facts.machine.after.links if facts.machine else ()
    narrow = [link for link in links if link.lanes < link.most_lanes]
    if not narrow:
        return None
    worst = min(narrow, key=lambda link: link.lanes / link.most_lanes)
    return Finding(
        "narrow-gpu-link",
        f"GPU {worst.device} has {worst.lanes} of {worst.most_lanes} PCI Express lanes",
        "it is in a slot of fewer lanes, on a riser, or not seated well: blocks move to host memory at that rate",
        "put it into a slot of its full width, or seat it again",
        0.5 * (1 - worst.lanes / worst.most_lanes) + 0.1,
        {"lanes": worst.lanes, "most_lanes": worst.most_lanes},
    )


def huge_pages_are_off(facts: ObservedFacts) -> Finding | None:
    """Before a start: the system gives no huge pages to a process. Mapped files may have some nevertheless."""
    machine = facts.machine
    if machine is None or facts.metrics or machine.after.huge_pages != "never":
        return None
    return Finding(
        "huge-pages-off",
        "/sys/kernel/mm/transparent_hugepage/enabled is never",
        "the KV pool, and weights that a file system has in small pages, are read in pages of 4 KiB",
        "set it to madvise (`echo madvise > /sys/kernel/mm/transparent_hugepage/enabled` on the host)",
        0.25,
        {"huge_page_bytes": 0.0},
    )


def few_files_may_be_open(facts: ObservedFacts) -> Finding | None:
    """Before a start: the limit of open files is below the connections that the server will have."""
    machine = facts.machine
    limit = machine.after.open_files_limit if machine else None
    if limit is None or facts.max_requests is None or limit >= facts.max_requests + _SPARE_FILES:
        return None
    return Finding(
        "open-files",
        f"{limit} files and connections may be open; --max-requests is {facts.max_requests}",
        "the limit of open files is too low",
        "raise it: `ulimit -n 65536`, LimitNOFILE= in systemd, or a container's ulimits",
        0.75,
        {"most_open_files": limit, "max_requests": facts.max_requests},
    )


MACHINE_RULES: tuple[Rule, ...] = (
    neighbours_are_busy,
    quota_is_used_up,
    memory_is_swapped,
    clocks_are_low,
    disk_is_full,
    link_is_narrow,
    few_files_may_be_open,
    huge_pages_are_off,
)
