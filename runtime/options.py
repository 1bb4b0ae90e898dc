"""What the caller of `Engine.load` may set, and how many KV blocks that gives the engine on this machine."""

import inspect
import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Concatenate, ParamSpec, TypeVar, get_type_hints

from ingot.artifact import Artifact, KVGeometry, Manifest, ModelFacts, open_artifact
from ingot.artifact.programs.stages import MOST_DEVICES, MOST_RANKS
from ingot.artifact.serving import POOL_BYTES, STEP, ArtifactOptions, parse_percent
from ingot.errors import UsageError, one_of, shown, shown_path, unknown
from ingot.options import Doc, Flag, Range, Reader, check_options, documented
from ingot.runtime.kv.states import SNAPSHOT_BLOCKS
from ingot.runtime.scheduling_policy import SchedulingPolicy
from ingot.runtime.speculation_options import DRAFTERS, SpeculationOptions, speculation_options
from ingot.settings import cache_dir
from ingot.sizes import format_bytes

_log = logging.getLogger(__name__)
_DISK = ("kv_disk_path", "kv_disk_bytes")  # a caller may give one of them, and the artifact the other
_MOST_ADAPTERS = 4096  # slots, and ranks of a matrix
_AT_LEAST_ONE = Range(ge=1)
_MEMORY_SHARE = 0.25  # of the free memory, by default
_STATE_SHARE = 0.125  # of the free memory for side state
_LEAST_STATES = 2  # a sequence and a snapshot
_MOST_MEMORY_SHARE = 0.5  # for one whole context, where the default share does not hold it
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")

_Fields = ParamSpec("_Fields")
_Owner = TypeVar("_Owner")
_Loaded = TypeVar("_Loaded")


def _folder(value: object) -> str | os.PathLike[str]:
    if not isinstance(value, str | os.PathLike) or not os.fspath(value) or "\0" in os.fspath(value):
        raise ValueError
    return value


def _folders(value: object) -> Mapping[str, str | os.PathLike[str]]:
    if not isinstance(value, Mapping):
        raise ValueError
    return {name: _folder(path) for name, path in value.items()}


@documented
@dataclass(frozen=True, kw_only=True)
class EngineOptions(ArtifactOptions, SchedulingPolicy):
    """Options of `Engine.load`. None leaves the choice to the engine and to the machine's free memory.

    An artifact may have defaults of its own for those in `ArtifactOptions`. They hold for options that the caller does
    not give: any value that is given counts, 0 and None included.

    Raises UsageError for a limit that no engine supports.
    """

    kv_blocks: Annotated[int | None, Doc("blocks of the KV pool, instead of kv_bytes", none="see kv_bytes")] = None
    state_slots: Annotated[
        int | None,
        STEP,
        Doc(
            "slots for the side state of models with recurrent layers: one for each running sequence, and the rest for"
            " snapshots, which prefix hits start from",
            none="by max_sequences and the free memory",
        ),
    ] = None
    kv_disk_path: Annotated[
        str | os.PathLike[str] | None,
        Reader(_folder, "the path of a folder", is_text=True),
        Doc("folder of kv_disk_bytes", none="one in the cache folder"),
    ] = None
    kv_offload_path: Annotated[
        str | os.PathLike[str] | None,
        Reader(_folder, "the path of a folder", is_text=True),
        Doc("folder of the file of kv_offload", none="kv_disk_path, or that of temporary files"),
    ] = None
    prefix_cache: Annotated[
        bool,
        Doc("keep the KV blocks of finished requests, and share those of common prompts"),
    ] = True
    max_requests: Annotated[
        int | None,
        _AT_LEAST_ONE,
        Doc("most unfinished requests, running and waiting; more are refused with Overloaded", none="no limit"),
    ] = None
    max_waiting_tokens: Annotated[
        int | None,
        _AT_LEAST_ONE,
        Doc(
            "most prompt tokens of requests that wait; a request that would exceed it while others wait is refused with"
            " Overloaded",
            none="no limit",
        ),
    ] = None
    reject_late: Annotated[
        bool,
        Doc(
            "refuse with Overloaded a request whose timeout_seconds is shorter than what the prompts that wait before"
            " it alone take, by the rates measured, instead of letting it end with timeout; its own prompt is not"
            " counted, because how much of it the prefix cache has is known at its admission"
        ),
    ] = False
    max_prompt_chars: Annotated[
        int | None,
        _AT_LEAST_ONE,
        Doc("most characters of a prompt's text", none="what can fit the model's context"),
    ] = None
    num_threads: Annotated[int | None, Doc("threads of an engine on the CPU", none="INGOT_THREADS or all cores")] = None
    stages: Annotated[
        int | None,
        Range(ge=1, le=MOST_DEVICES),
        Doc(
            "processes of the native CPU engine, each with a part of the layers and of num_threads, which compute"
            " different requests at once",
            none="one",
        ),
    ] = None
    tensor_parallel: Annotated[
        int | None,
        Range(ge=1, le=MOST_RANKS),
        Doc(
            "processes of the native CPU engine, for each stage, that compute every step together: each reads a part"
            " of every weight",
            none="one",
        ),
    ] = None
    expert_parallel: Annotated[
        bool,
        Doc("with tensor_parallel, each process has some experts whole, instead of a part of every expert"),
    ] = False
    adapters: Annotated[
        Mapping[str, str | os.PathLike[str]],
        Reader(_folders, "a mapping from names to folders"),
        Flag("--lora-modules"),
        Doc("LoRA adapters to load at the start: folders that PEFT saved, by the names that requests use"),
    ] = field(default_factory=dict)
    chat_template: Annotated[
        str | os.PathLike[str] | None,
        Reader(_folder, "the path of a file", is_text=True),
        Flag("--chat-template", "FILE"),
        Doc("jinja2 template for conversations, in place of the artifact's", none="that of the artifact"),
    ] = None
    max_adapters: Annotated[
        int,
        Range(ge=0, le=_MOST_ADAPTERS),
        Doc(
            "slots for LoRA adapters, which is how many different ones the requests of one step may have; memory is"
            " used by those that are loaded"
        ),
    ] = 16
    max_adapter_rank: Annotated[int, Range(ge=1, le=_MOST_ADAPTERS), Doc("largest rank of an adapter's matrices")] = 256
    max_host_adapters: Annotated[
        int | None,
        _AT_LEAST_ONE,
        Doc(
            "adapters whose matrices are kept in host memory, those that were used last; the others are read again from"
            " their folders",
            none="all that are loaded",
        ),
    ] = None
    adapter_bytes: Annotated[
        int | None,
        POOL_BYTES,
        Doc(
            "memory of a GPU for the matrices of adapters in slots; without effect on the CPU",
            none="room for max_adapters of rank 16, or of max_adapter_rank if it is less",
        ),
    ] = None
    speculation: Annotated[
        SpeculationOptions | Path | str | None,
        Reader(speculation_options),
        Flag("--speculate"),
        Doc(
            f"{one_of(DRAFTERS)}, the folder of a draft artifact, several of them joined by +, or SpeculationOptions:"
            " verify several drafted tokens in one step, which never changes a token",
            none="one token at a time",
        ),
    ] = None

    @property
    def chat_template_file(self) -> Path | None:
        """The file of `chat_template`."""
        return None if self.chat_template is None else Path(self.chat_template)

    def __post_init__(self) -> None:
        check_options(self)
        if self.chat_template_file and not self.chat_template_file.is_file():
            raise UsageError(
                f"chat_template {shown_path(self.chat_template_file)} is not a file; name a jinja2 template"
            )
        if self.expert_parallel and (self.tensor_parallel or 1) == 1:
            raise UsageError(
                "expert_parallel is set without tensor_parallel, the number of processes that divide the experts; set"
                " that to 2 or more, or leave expert_parallel out"
            )
        cores = self.cpu_affinity
        if cores is not None and self.num_threads not in (None, len(cores)):
            raise UsageError(
                f"num_threads is {self.num_threads} and cpu_affinity names {len(cores)} cores; each thread has a core"
                " of its own, so name as many, or leave out num_threads"
            )
        if (self.kv_disk_path is None) != (self.kv_disk_bytes == 0):
            path = self.kv_disk_path
            raise UsageError(
                f"kv_disk_path is {shown(path if path is None else os.fspath(path))} and kv_disk_bytes is"
                f" {self.kv_disk_bytes}; a disk tier takes a folder and the most bytes in it, so give both or neither"
            )


def checked_seconds(name: str, seconds: float | None) -> None:
    """Raise UsageError unless it is a time that the caller may wait, or None."""
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if seconds is not None and not (is_number and 0 <= seconds < math.inf):
        raise UsageError(f"{name} is {shown(seconds)}; it must be a finite number, 0 or above, or None for no limit")


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

        types = get_type_hints(options)
        parameters = {
            name: parameter.replace(annotation=types[name])
            for name, parameter in inspect.signature(options).parameters.items()
        }
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
    kv_bytes: int | str | None = None,
    max_sequences: int,
    free_bytes: int | None = None,
) -> PoolSize:
    """Choose the KV pool's size and log the reason. By default a quarter of the free memory, or less if that suffices.

    Raises UsageError when both sizes are given, or when one is too small for a block.
    """

    def free() -> int:
        return free_memory_bytes() if free_bytes is None else free_bytes

    size = explicit_pool_size(kv, kv_blocks, kv_bytes, free) or _automatic(model, kv, max_sequences, free())
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


def free_memory_bytes(cgroup: Path = _CGROUP, membership: Path = _MEMBERSHIP) -> int:
    """Memory available to this process: the system's, or less where a control group (v2 or v1) limits it."""
    rows = [line.split(":", 2) for line in membership.read_text().splitlines()] if membership.is_file() else []
    own = next((path for _, controllers, path in rows if "memory" in controllers.split(",")), "/")
    older = cgroup / "memory" / own.strip("/")
    free = min(
        _available_bytes(),
        _left_of(cgroup, "memory.max", "memory.current", "file"),
        _left_of(older, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache"),
    )
    return int(max(0, free))


def _left_of(group: Path, limit: str, used: str, cache: str) -> float:
    """The bytes that a control group may still take; infinite without a limit."""
    try:
        most = (group / limit).read_text().strip()
        taken = int((group / used).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:  # no such group here
        return math.inf
    # Cached pages can be reclaimed, though they count as used: mapped weights are there.
    return math.inf if most == "max" else int(most) - taken + int(stat.get(cache, 0))


def explicit_pool_size(
    kv: KVGeometry, kv_blocks: int | None, kv_bytes: int | str | None, free_bytes: Callable[[], int]
) -> PoolSize | None:
    """The size that the caller set; None if none is set. Raises UsageError as `resolve_pool_size` does.

    free_bytes   the device's free memory, of which `kv_bytes` may be a share
    """
    if kv_blocks is not None and kv_bytes is not None:
        raise UsageError(f"kv_blocks is {kv_blocks} and kv_bytes is {kv_bytes}; give one of them, or none")
    if kv_blocks is not None:
        if kv_blocks < 1:
            raise UsageError(f"kv_blocks is {kv_blocks}; the pool needs at least 1 block of {kv.block_tokens} tokens")
        return PoolSize(kv_blocks, "set by kv_blocks")
    if kv_bytes is None:
        return None
    if isinstance(kv_bytes, str):
        free = free_bytes()
        share = int(free * parse_percent(kv_bytes) / 100)
        if share < kv.block_bytes:
            raise UsageError(
                f"kv_bytes is {kv_bytes} of {format_bytes(free)} free memory, which is {format_bytes(share)}; one block"
                f" takes {format_bytes(kv.block_bytes)}: free some memory, or give more"
            )
        return PoolSize(share // kv.block_bytes, f"kv_bytes={kv_bytes} of {format_bytes(free)} free memory")
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
