"""What the caller of `Engine.load` may set, and how many KV blocks that gives the engine on this machine."""

import inspect
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from numbers import Integral
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, get_args

from ingot.artifact import Artifact, KVGeometry, Manifest, ModelFacts, open_artifact
from ingot.artifact.serving import MOST_BYTES, WeightPlacement
from ingot.cores import parse_cores
from ingot.errors import UsageError, shown, unknown
from ingot.runtime.kv.cost_model import DEFAULT_RULE, RestoreRule, require_rule
from ingot.runtime.kv.policies import DEFAULT_POLICY, require_policy
from ingot.runtime.kv.states import SNAPSHOT_BLOCKS
from ingot.runtime.speculation.options import SpeculationOptions, speculation_options
from ingot.runtime.steps.policy import Batching, SchedulingPolicy
from ingot.settings import cache_dir
from ingot.sizes import format_bytes

_log = logging.getLogger(__name__)
_NOT_INTEGERS = (
    "prefix_cache",
    "reject_late",
    "batching",
    "batch_wait_seconds",
    "speculation",
    "kv_disk_path",
    "kv_policy",
    "kv_restore",
    "cpu_affinity",
    "weights",
    "adapters",
)
_TIER_BYTES = ("kv_host_bytes", "kv_disk_bytes")
_DISK = ("kv_disk_path", "kv_disk_bytes")  # a caller may give one of them, and the artifact the other
_LARGEST_LIMIT = 2**20  # of tokens or sequences in a step: buffers of that size still fit a machine's memory
_MOST_ADAPTERS = 4096  # slots, and ranks of a matrix
_MEMORY_SHARE = 0.25  # of the free memory, by default
_STATE_SHARE = 0.125  # of the free memory for side state
_LEAST_STATES = 2  # a sequence and a snapshot
_MOST_MEMORY_SHARE = 0.5  # for one whole context, where the default share does not hold it
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")

_Fields = ParamSpec("_Fields")
_Owner = TypeVar("_Owner")
_Loaded = TypeVar("_Loaded")


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of `Engine.load`. None leaves the choice to the engine and to the machine's free memory.

    An artifact may have defaults of its own for those in `ServingOptions`. They hold for options that the caller does
    not give: any value that is given counts, 0 and None included.

    kv_blocks          blocks in the KV pool
    kv_bytes           size of the KV pool, instead of `kv_blocks`
    state_slots        slots for the side state of models with recurrent layers: one for each running sequence, and the
                       rest for snapshots, which prefix hits start from. None: by max_sequences and the free memory
    kv_host_bytes      memory for blocks that leave the pool, to be restored instead of computed; 0: none
    kv_disk_bytes      most bytes of blocks on disk, which outlive host memory and the process; see docs/kv-cache.md
    kv_disk_path       their folder; `Engine.load` takes one in the cache folder unless it is given
    kv_policy          which blocks host memory gives up first
    kv_restore         "auto": restore blocks where that is faster than to compute them; "always": all that are stored
    max_batch_tokens   most tokens in a step
    max_sequences      most sequences in a step
    prefix_cache       keep the KV blocks of finished requests, and share those of common prompts
    max_requests       most unfinished requests, running and waiting; more are refused with Overloaded. None: no limit
    max_waiting_tokens most prompt tokens of requests that wait; a request that would exceed it while others wait is
                       refused with Overloaded. None: no limit
    reject_late        refuse with Overloaded a request whose `timeout_seconds` is shorter than what the prompts that
                       wait before it alone take, by the rates measured, instead of letting it end with "timeout". Its
                       own prompt is not counted: how much of it the prefix cache has is known at its admission
    batching, batch_wait_seconds, priority_aging_tokens
                       see `SchedulingPolicy`; batching other than "continuous" is for comparison
    max_prompt_chars   most characters of a prompt's text; None: what can fit the model's context
    num_threads        threads of an engine on the CPU
    cpu_affinity       cores of the native CPU engine's threads, one each: thread i runs on the i-th core alone.
                       Numbers, or text such as "0-3,8". The engines of a process share its threads, so all that name
                       cores name the same. None: the system chooses
    weights            of an engine on the CPU. "mapped": processes share the file's pages, which are made huge where
                       the system allows it; "copied": in huge pages of this process alone; "auto": mapped, or copied
                       where the file gets small pages only and memory allows. See docs/cpu.md
    adapters           LoRA adapters to load at the start: folders that PEFT saved, by the names that requests use
    max_adapters       slots for LoRA adapters, which is how many different ones the requests of one step may have;
                       memory is used by those that are loaded. For executors without adapters it says nothing
    max_adapter_rank   largest rank of an adapter's matrices
    max_host_adapters  adapters whose matrices are kept in host memory, those that were used last; the others are read
                       again from their folders. None: all that are loaded
    speculation        "lookup", the folder of a draft artifact, or SpeculationOptions: verify several drafted tokens in
                       one step, which never changes a token. None: one token at a time

    Raises UsageError for a limit that no engine supports.
    """

    kv_blocks: int | None = None
    kv_bytes: int | None = None
    state_slots: int | None = None
    kv_host_bytes: int = 0
    kv_disk_path: str | os.PathLike[str] | None = None
    kv_disk_bytes: int = 0
    kv_policy: str = DEFAULT_POLICY
    kv_restore: RestoreRule = DEFAULT_RULE
    max_batch_tokens: int | None = None
    max_sequences: int | None = None
    prefix_cache: bool = True
    max_requests: int | None = None
    max_waiting_tokens: int | None = None
    reject_late: bool = False
    batching: Batching = "continuous"
    batch_wait_seconds: float = 0.05
    priority_aging_tokens: int | None = None
    max_prompt_chars: int | None = None
    num_threads: int | None = None
    cpu_affinity: Sequence[int] | str | None = None
    weights: WeightPlacement = "auto"
    adapters: Mapping[str, str | os.PathLike[str]] = field(default_factory=dict)
    max_adapters: int = 16
    max_adapter_rank: int = 256
    max_host_adapters: int | None = None
    speculation: SpeculationOptions | Path | str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "speculation", speculation_options(self.speculation))
        object.__setattr__(self, "cpu_affinity", self._checked_cores())
        for name, value in vars(self).items():
            if name in _NOT_INTEGERS or value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, Integral):
                default = " of bytes, or 0 for none" if name in _TIER_BYTES else ", or None for the default"
                raise UsageError(f"{name} is {shown(value)}; it must be a whole number{default}")
        for name in ("max_batch_tokens", "max_sequences", "state_slots"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= _LARGEST_LIMIT:
                raise UsageError(f"{name} is {value}; it must be from 1 to {_LARGEST_LIMIT}")
        for name, least in (("max_adapters", 0), ("max_adapter_rank", 1)):
            value = getattr(self, name)
            if value is None or not least <= value <= _MOST_ADAPTERS:
                raise UsageError(f"{name} is {value}; it must be from {least} to {_MOST_ADAPTERS}")
        if not isinstance(self.adapters, Mapping) or not all(map(_is_path, self.adapters.values())):
            raise UsageError(f"adapters is {shown(self.adapters)}; it must be a mapping from names to folders")
        for name in ("max_requests", "max_waiting_tokens", "max_prompt_chars", "max_host_adapters"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} is {value}; it must be at least 1, or None")
        for name in ("prefix_cache", "reject_late"):
            if not isinstance(value := getattr(self, name), bool):
                raise UsageError(f"{name} is {shown(value)}; it must be True or False")
        if self.weights not in get_args(WeightPlacement):
            allowed = ", ".join(get_args(WeightPlacement))
            raise UsageError(f"weights is {shown(self.weights)}; it must be one of {allowed}")
        _ = self.scheduling  # checks its values
        self._check_tiers()

    @property
    def scheduling(self) -> SchedulingPolicy:
        """What the scheduler takes of them."""
        return SchedulingPolicy(self.batching, self.batch_wait_seconds, self.priority_aging_tokens)

    def _checked_cores(self) -> tuple[int, ...] | None:
        try:
            cores = None if self.cpu_affinity is None else parse_cores(self.cpu_affinity)
        except ValueError as error:
            raise UsageError(f"cpu_affinity: {error}") from error
        if cores is not None and self.num_threads not in (None, len(cores)):
            raise UsageError(
                f"num_threads is {self.num_threads} and cpu_affinity names {len(cores)} cores; each thread has a core"
                " of its own, so name as many, or leave out num_threads"
            )
        return cores

    def _check_tiers(self) -> None:
        require_policy(self.kv_policy)
        require_rule(self.kv_restore)
        for name in _TIER_BYTES:
            value = getattr(self, name)
            if value is None or not 0 <= value <= MOST_BYTES:
                raise UsageError(
                    f"{name} is {value}; it must be a number of bytes, or 0 for none, and at most {MOST_BYTES}"
                )
        if self.kv_disk_path is not None and not _is_path(self.kv_disk_path):
            raise UsageError(f"kv_disk_path is {shown(self.kv_disk_path)}; it must be the path of a folder")
        if (self.kv_disk_path is None) != (self.kv_disk_bytes == 0):
            raise UsageError(
                f"kv_disk_path is {_path_shown(self.kv_disk_path)} and kv_disk_bytes is {self.kv_disk_bytes};"
                " a disk tier takes a folder and the most bytes in it, so give both or neither"
            )


def checked_seconds(name: str, seconds: float | None) -> None:
    """Raise UsageError unless it is a time that the caller may wait, or None."""
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if seconds is not None and not (is_number and 0 <= seconds < math.inf):
        raise UsageError(f"{name} is {shown(seconds)}; it must be a finite number, 0 or above, or None for no limit")


def _is_path(value: object) -> bool:
    path = os.fspath(value) if isinstance(value, str | os.PathLike) else ""
    return bool(path) and "\0" not in path


def _path_shown(path: str | os.PathLike[str] | None) -> str:
    return shown(path if path is None else os.fspath(path))


def takes_options(
    options: Callable[_Fields, EngineOptions],
) -> Callable[
    [Callable[[_Owner, Artifact, EngineOptions], _Loaded]],
    Callable[Concatenate[_Owner, Artifact | Path | str, _Fields], _Loaded],
]:
    """Turn a method `load(cls, artifact, options)` into one that takes the fields of `EngineOptions` as keywords.

    It opens an artifact that is given by its path. Fields that the caller leaves out get the artifact's defaults.
    """

    def decorate(
        load: Callable[[_Owner, Artifact, EngineOptions], _Loaded],
    ) -> Callable[Concatenate[_Owner, Artifact | Path | str, _Fields], _Loaded]:
        @wraps(load)
        def load_with(
            owner: _Owner, artifact: Artifact | Path | str, /, *args: _Fields.args, **fields: _Fields.kwargs
        ) -> _Loaded:
            for name in fields.keys() - parameters.keys():
                raise UsageError(unknown("option", name, parameters, "options of Engine.load"))
            alone: dict[str, Any] = {name: value for name, value in fields.items() if name not in _DISK}
            options(*args, **alone)  # a mistake of the caller's is refused before gigabytes are verified
            opened = artifact if isinstance(artifact, Artifact) else open_artifact(artifact)
            defaults = serving_defaults(opened.manifest, fields)
            return load(owner, opened, options(*args, **(defaults | fields)))

        parameters = inspect.signature(options).parameters
        own = list(inspect.signature(load_with, follow_wrapped=False).parameters.values())[:2]
        load_with.__signature__ = inspect.Signature([*own, *parameters.values()])  # type: ignore[attr-defined]  # what `help` prints
        return load_with

    return decorate


def serving_defaults(manifest: Manifest, given: Mapping[str, object]) -> dict[str, Any]:
    """The options that the artifact sets and the caller, whose own are `given`, does not.

    A default of the KV pool gives way to a size of the caller in the other unit, cores to a number of threads, and one
    of the disk to `kv_disk_path=None`. Without a path, blocks on disk are in the cache folder's
    `kv/NAME OF THE ARTIFACT`.
    """
    sealed = manifest.serving.given() if manifest.serving else {}
    defaults: dict[str, Any] = {name: value for name, value in sealed.items() if name not in given}
    if "kv_blocks" in given:
        defaults.pop("kv_bytes", None)
    if given.get("num_threads") is not None:
        defaults.pop("cpu_affinity", None)
    if given.get("kv_disk_path", "") is None:
        defaults.pop("kv_disk_bytes", None)
    if defaults:
        _log.info("options set by the artifact: %s", ", ".join(f"{name}={value}" for name, value in defaults.items()))
    if "kv_disk_path" not in given and given.get("kv_disk_bytes", defaults.get("kv_disk_bytes")):
        defaults["kv_disk_path"] = cache_dir() / "kv" / manifest.name
    return defaults


@dataclass(frozen=True)
class PoolSize:
    """Number of blocks in the KV pool, and the reason for it."""

    num_blocks: int
    reason: str


def resolve_pool_size(
    model: ModelFacts,
    kv: KVGeometry,
    *,
    kv_blocks: int | None = None,
    kv_bytes: int | None = None,
    max_sequences: int,
    free_bytes: int | None = None,
) -> PoolSize:
    """Choose the KV pool's size and log the reason. By default a quarter of the free memory, or less if that suffices.

    Raises UsageError when both sizes are given, or when one is too small for a block.
    """
    size = explicit_pool_size(kv, kv_blocks, kv_bytes) or _automatic(
        model, kv, max_sequences, free_memory_bytes() if free_bytes is None else free_bytes
    )
    _log.info("KV pool: %d blocks of %d tokens (%s)", size.num_blocks, kv.block_tokens, size.reason)
    return size


def resolve_state_slots(
    kv: KVGeometry, options: EngineOptions, *, num_blocks: int, max_sequences: int, free_bytes: int | None = None
) -> int:
    """Choose the number of slots for side state and log the reason; 0 for a model without any.

    By default: a slot for each sequence of a step, one more where drafts are verified, and as many snapshots as the
    pool's blocks have places for or sequences of a step, the larger; up to an eighth of the free memory.
    Raises UsageError for `state_slots` of a model without side state.
    """
    if not kv.state_bytes:
        if options.state_slots is not None:
            raise UsageError(
                f"state_slots is {options.state_slots}, but the model keeps no side state of its sequences; leave it"
                " out"
            )
        return 0
    if options.state_slots is not None:
        _log.info("side state: %d slots of %s (state_slots)", options.state_slots, format_bytes(kv.state_bytes))
        return options.state_slots
    live = max_sequences * (1 if options.speculation is None else 2)
    wanted = live + max(max_sequences, num_blocks // SNAPSHOT_BLOCKS)
    free = free_memory_bytes() if free_bytes is None else free_bytes
    fitting = max(_LEAST_STATES, int(free * _STATE_SHARE) // kv.state_bytes)
    slots = min(wanted, fitting)
    reason = f"{live} for sequences" if slots == wanted else f"{_STATE_SHARE:.1%} of {format_bytes(free)} free memory"
    _log.info("side state: %d slots of %s (%s)", slots, format_bytes(kv.state_bytes), reason)
    return slots


def free_memory_bytes(cgroup: Path = _CGROUP) -> int:
    """Memory available to this process: the system's, or less where a control group (v2) limits it."""
    free = _available_bytes()
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except OSError:  # no control groups here
        return free
    cache = int(stat.get("file", 0))  # reclaimable, though counted as used: mapped weights are here
    return free if limit == "max" else max(0, min(free, int(limit) - used + cache))


def explicit_pool_size(kv: KVGeometry, kv_blocks: int | None, kv_bytes: int | None) -> PoolSize | None:
    """The size that the caller set; None if none is set. Raises UsageError as `resolve_pool_size` does."""
    if kv_blocks is not None and kv_bytes is not None:
        raise UsageError(f"kv_blocks is {kv_blocks} and kv_bytes is {kv_bytes}; give one of them, or none")
    if kv_blocks is not None:
        if kv_blocks < 1:
            raise UsageError(f"kv_blocks is {kv_blocks}; the pool needs at least 1 block of {kv.block_tokens} tokens")
        return PoolSize(kv_blocks, "set by kv_blocks")
    if kv_bytes is None:
        return None
    if kv_bytes < kv.block_bytes:
        raise UsageError(f"kv_bytes is {kv_bytes}; one block takes {kv.block_bytes} bytes, and at least one is needed")
    return PoolSize(kv_bytes // kv.block_bytes, f"kv_bytes={kv_bytes} at {kv.block_bytes} bytes each")


def _available_bytes() -> int:
    if _MEMINFO.is_file():
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _automatic(model: ModelFacts, kv: KVGeometry, max_sequences: int, free_bytes: int) -> PoolSize:
    per_context = -(-model.context_tokens // kv.block_tokens)
    usable = per_context * max_sequences
    fitting = int(free_bytes * _MEMORY_SHARE) // kv.block_bytes
    if usable <= fitting:
        return PoolSize(usable, f"{max_sequences} sequences of the model's {model.context_tokens} tokens")
    share = _MEMORY_SHARE
    if fitting < per_context:
        share = _MOST_MEMORY_SHARE
        fitting = min(per_context, int(free_bytes * share) // kv.block_bytes)
    reason = f"up to {share:.0%} of {format_bytes(free_bytes)} free memory"
    if fitting < per_context:
        reason += f"; less than one context of {model.context_tokens} tokens, so long requests will be refused"
    return PoolSize(max(1, fitting), reason)
