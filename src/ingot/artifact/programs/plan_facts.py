"""Facts about a program's TensorRT plans: program/plans.json, and the header of a plan.

TensorRT-RTX does not document the header; these are the fields of version 1.7, little-endian:

    0     'vtrt'                      24    version, one byte each: 1, 7, 1, 116
    8     format, u64                 32    SMs, one bit each, u64: 75, 80, 86, 89, 120, 121
    16    bytes of the plan, u64      64    table of sections: 4 letters, ..., offset u64, bytes u64
"""

import struct
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from ingot.errors import ArtifactError

PLANS_FILE = "program/plans.json"
HEADER_BYTES = 512
_MAGIC = b"vtrt"
_SMS = (75, 80, 86, 89, 120, 121)
_WEIGHTS = b"THGW"
_TABLE = 0x40


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class PlanProfile(_Frozen):
    """One optimization profile: its rows, and how often each operator is launched in it."""

    least_rows: int = Field(ge=0)
    most_rows: int = Field(ge=1)
    operators: dict[str, int]


class PlanFacts(_Frozen):
    """Facts of one plan.

    weight_bytes    bytes of constants in the plan; weights that are inputs are in the program's weights
    segments        number of program segments that it runs
    profiles        operators are empty if the plan's text cannot be parsed
    """

    file: str
    library: str
    version: str
    sms: tuple[int, ...]
    bytes: int = Field(ge=1)
    weight_bytes: int = Field(ge=0)
    segments: int = Field(default=1, ge=1)
    profiles: tuple[PlanProfile, ...]


class ProgramPlans(_Frozen):
    """program/plans.json."""

    plans: tuple[PlanFacts, ...]


@dataclass(frozen=True)
class PlanHeader:
    """A plan's header. `weights_offset` is the end of the plan if it holds no weights."""

    version: str
    sms: tuple[int, ...]
    weights_offset: int
    weight_bytes: int


def is_rtx_plan(start: bytes) -> bool:
    """Whether these are the first bytes of a TensorRT-RTX plan."""
    return start[: len(_MAGIC)] == _MAGIC


def read_plan_header(start: bytes, name: str) -> PlanHeader:
    """Parse the first HEADER_BYTES bytes of a plan; ArtifactError if it is not a TensorRT-RTX plan."""
    if not is_rtx_plan(start) or len(start) < _TABLE:
        raise ArtifactError(f"{name} is not a TensorRT-RTX plan: it begins with {start[:4]!r}")
    body, version, mask = struct.unpack_from("<Q4s4xQ", start, 0x10)
    at = start.find(_WEIGHTS, _TABLE, HEADER_BYTES)
    offset, size = struct.unpack_from("<QQ", start, at + 8) if at >= 0 else (body, 0)
    sms = tuple(sm for bit, sm in enumerate(_SMS) if mask >> bit & 1)
    return PlanHeader(".".join(map(str, version)), sms, offset, size)
