"""Defaults of an artifact for the options of `Engine.load`: the recipe's section `serving`.

The manifest seals these options as data, under its own digest. The identity does not cover them: it says what computes
the tokens, and the keys of stored KV blocks chain over it. Memory and limits of a step change speed, but no token: an
artifact that is built again with more host memory finds the blocks that its predecessor stored.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from ingot.cores import CORES_PATTERN, MOST_CORE, parse_cores
from ingot.errors import shown

MOST_BYTES = 1 << 50  # far above any machine: a slip is refused when the recipe is read
MOST_STEP_TOKENS = 1 << 20  # buffers of that size still fit a machine's memory
KVPolicy = Literal["lru-uses", "lru", "arc"]
KVRestore = Literal["auto", "always"]

_UNITS: Mapping[str, int] = {
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("kMGT", 1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", 1)},
}
_SIZE = rf"([0-9]{{1,16}}(?:\.[0-9]{{1,9}})?) ?({'|'.join(_UNITS)})?"


def parse_bytes(text: str) -> int:
    """Return the bytes of a size such as 4GiB, 1.5 GB or 4096. Raises ValueError for anything else."""
    found = re.fullmatch(_SIZE, text.strip())
    if found is None:
        units = ", ".join(_UNITS)
        raise ValueError(f"{shown(text)} is not a size; write a number of bytes, or one with a unit: {units}")
    return round(float(found[1]) * _UNITS.get(found[2], 1))


def _as_bytes(value: object) -> object:
    """Return a size given as text or as a float without a fraction as an integer."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return parse_bytes(value) if isinstance(value, str) else value


def _as_count(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


_SIZE_SCHEMA = {
    "anyOf": [{"type": "integer", "minimum": 0, "maximum": MOST_BYTES}, {"type": "string", "pattern": f"^{_SIZE}$"}]
}
ByteSize = Annotated[
    int, Field(ge=0, le=MOST_BYTES), BeforeValidator(_as_bytes), WithJsonSchema(_SIZE_SCHEMA, mode="validation")
]
_CORE_SCHEMA = {"type": "integer", "minimum": 0, "maximum": MOST_CORE}
_CORES_SCHEMA = {
    "anyOf": [
        {"type": "array", "items": _CORE_SCHEMA, "minItems": 1, "uniqueItems": True},
        _CORE_SCHEMA,
        {"type": "string", "pattern": CORES_PATTERN},
    ]
}
_Cores = Annotated[tuple[int, ...], BeforeValidator(parse_cores), WithJsonSchema(_CORES_SCHEMA, mode="validation")]
_StepLimit = Annotated[int, Field(ge=1, le=MOST_STEP_TOKENS), BeforeValidator(_as_count)]


class ServingOptions(BaseModel):
    """Options of `Engine.load` for callers that do not give them; null leaves the choice to the runtime."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    max_batch_tokens: _StepLimit | None = Field(
        default=None, description="maximum tokens per engine step; null: engine.max_batch_tokens"
    )
    max_sequences: _StepLimit | None = Field(
        default=None, description="maximum sequences per engine step; null: what the engine allows"
    )
    kv_bytes: Annotated[ByteSize, Field(ge=1)] | None = Field(
        default=None, description="size of the KV pool, such as 2GiB; null: by context and free memory"
    )
    kv_host_bytes: ByteSize | None = Field(
        default=None, description="host memory for blocks that leave the pool, such as 8GiB; null: none"
    )
    kv_disk_bytes: ByteSize | None = Field(
        default=None, description="disk space for blocks that outlive the process, such as 50GiB; null: none"
    )
    kv_policy: KVPolicy | None = Field(
        default=None, description="which blocks host memory gives up first; null: lru-uses"
    )
    kv_restore: KVRestore | None = Field(
        default=None, description="auto: restore blocks where that is faster than computing; always: all; null: auto"
    )

    cpu_affinity: _Cores | None = Field(
        default=None, description="cores of the native CPU engine's threads, such as 0-3 or [0, 2]; null: any"
    )

    def given(self) -> dict[str, int | str | tuple[int, ...]]:
        """The options that are set, by name."""
        return {name: value for name, value in self if value is not None}
