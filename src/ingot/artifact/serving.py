"""Defaults of an artifact for the options of `Engine.load`: the recipe's section `serving`.

The manifest seals these options as data, under its own digest. The identity does not cover them: it says what computes
the tokens, and the keys of stored KV blocks chain over it. Memory and limits of a step change speed, but no token: an
artifact that is built again with more host memory finds the blocks that its predecessor stored.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model

from ingot.artifact.section import key_type
from ingot.cores import CORES_PATTERN, MOST_CORE, parse_cores
from ingot.errors import shown
from ingot.options import MOST_BYTES, SIZE_PATTERN, Doc, Range, Reader, options_of, parse_bytes

MOST_STEP_TOKENS = 1 << 20  # buffers of that size still fit a machine's memory
KVPolicy = Literal["lru-uses", "lru", "arc"]
KVRestore = Literal["auto", "always"]
WeightPlacement = Literal["auto", "mapped", "copied"]
OffloadTo = Literal["file", "memory"]

STEP = Range(ge=1, le=MOST_STEP_TOKENS)
POOL_BYTES = Range(ge=1, le=MOST_BYTES, bytes=True)
_PERCENT_PATTERN = r"([0-9]{1,6}(?:\.[0-9]{1,3})?) ?%"
_MOST_POOL_PERCENT = 95
_MOST_OFFLOAD_PERCENT = 10_000
_TIER_BYTES = Range(
    ge=0, le=MOST_BYTES, bytes=True, words=f"a whole number of bytes, or 0 for none, and at most {MOST_BYTES}"
)
_CORE_SCHEMA = {"type": "integer", "minimum": 0, "maximum": MOST_CORE}
_CORES = Reader(
    parse_cores,
    schema={
        "anyOf": [
            {"type": "array", "items": _CORE_SCHEMA, "minItems": 1, "uniqueItems": True},
            _CORE_SCHEMA,
            {"type": "string", "pattern": CORES_PATTERN},
        ]
    },
    reads=tuple[int, ...],
)


def parse_percent(text: str) -> float:
    """Return the number of a share such as 70%. ValueError for anything else."""
    found = re.fullmatch(_PERCENT_PATTERN, text.strip())
    if found is None:
        raise ValueError(f"{shown(text)} is not a share; write a number and %, such as 70%")
    return float(found[1])


def _size_reader(*words: str, most_percent: int, allowed: str) -> Reader:
    """Reads a number of bytes, a size with a unit, a share up to so many percent, or one of a few words."""

    def read(value: object) -> int | str:
        refusal = ValueError(f"it is {shown(value)}; it must be {allowed}")
        if isinstance(value, str) and value in words:
            return value
        if isinstance(value, str) and value.strip().endswith("%"):
            if not 0 < parse_percent(value) <= most_percent:
                raise refusal
            return value.strip()
        size = parse_bytes(value) if isinstance(value, str) else value
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= MOST_BYTES:
            raise refusal
        return size

    texts = [{"type": "string", "pattern": f"^{pattern}$"} for pattern in (SIZE_PATTERN, _PERCENT_PATTERN)]
    either = [{"type": "integer", "minimum": 1, "maximum": MOST_BYTES}, *texts]
    schema = {"anyOf": [*either, {"enum": [*words]}] if words else either}
    return Reader(read, allowed, schema, reads=int | str)


_SIZE = f"a number of bytes from 1 to {MOST_BYTES}, a size such as 2GiB"
_POOL_BYTES = _size_reader(
    most_percent=_MOST_POOL_PERCENT,
    allowed=f"{_SIZE}, or a share of the free memory such as 70%, up to {_MOST_POOL_PERCENT}%",
)
_OFFLOAD = _size_reader(
    "auto",
    "off",
    most_percent=_MOST_OFFLOAD_PERCENT,
    allowed=f"auto, off, {_SIZE}, or a share of the fast part such as 200%, up to {_MOST_OFFLOAD_PERCENT}%",
)


@dataclass(frozen=True, kw_only=True)
class ArtifactOptions:
    """The options of `EngineOptions` for which an artifact may have defaults of its own."""

    max_batch_tokens: Annotated[
        int | None,
        STEP,
        Doc("maximum tokens per engine step", none="engine.max_batch_tokens"),
    ] = None
    max_sequences: Annotated[
        int | None,
        STEP,
        Doc("maximum sequences per engine step", none="what the engine allows"),
    ] = None
    kv_bytes: Annotated[
        int | str | None,
        _POOL_BYTES,
        Doc(
            "size of the KV pool, such as 2GiB, or a share of the free memory, such as 70%",
            none="by context and free memory",
        ),
    ] = None
    kv_offload: Annotated[
        int | str,
        _OFFLOAD,
        Doc(
            "slow part of the KV pool, for requests that the rest cannot hold: a size such as 50GiB or a share of the"
            " rest such as 200%; auto: on a CPU what one whole context lacks, up to half of the free space, where no"
            " number gives the size of the rest, and on a GPU none; off: none"
        ),
    ] = "auto"
    kv_offload_to: Annotated[
        OffloadTo,
        Doc(
            "file: the slow part is in an unnamed file, of which the system keeps in memory what fits; memory: in it,"
            " as that of a GPU always is"
        ),
    ] = "file"
    kv_host_bytes: Annotated[
        int,
        _TIER_BYTES,
        Doc("host memory for blocks that leave the pool, such as 8GiB", none="none"),
    ] = 0
    kv_disk_bytes: Annotated[
        int,
        _TIER_BYTES,
        Doc("disk space for blocks that outlive the process, such as 50GiB", none="none"),
    ] = 0
    kv_policy: Annotated[KVPolicy, Doc("which blocks host memory gives up first")] = "lru-uses"
    kv_restore: Annotated[
        KVRestore,
        Doc("auto: restore blocks where that is faster than computing; always: all"),
    ] = "auto"
    cpu_affinity: Annotated[
        Sequence[int] | str | None,
        _CORES,
        Doc("cores of the native CPU engine's threads, such as 0-3 or [0, 2]", none="any"),
    ] = None
    weights: Annotated[
        WeightPlacement,
        Doc(
            "mapped: the weights of an engine on the CPU stay in the file's pages, which processes share; copied: in"
            " huge pages of the process; auto: mapped, or copied where the file gets small pages and memory allows"
        ),
    ] = "auto"


class _Serving(BaseModel):
    """Options of `Engine.load` for callers that do not give them; null leaves the choice to the runtime."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    if TYPE_CHECKING:  # its fields are made from the declarations

        def __init__(self, **options: Any) -> None: ...

        def __getattr__(self, name: str) -> Any: ...

    def given(self) -> dict[str, int | str | tuple[int, ...]]:
        """The options that are set, by name."""
        return {name: value for name, value in self if value is not None}


if TYPE_CHECKING:
    ServingOptions = _Serving
else:
    ServingOptions = create_model(
        "ServingOptions",
        __base__=_Serving,
        __doc__=_Serving.__doc__,
        __module__=__name__,
        **{
            name: (key_type(option) | None, Field(default=None, description=option.meaning))
            for name, option in options_of(ArtifactOptions).items()
        },
    )
