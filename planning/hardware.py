"""Rows of hardware: figures of data sheets by name, from hardware.yaml and from files of the user's.

A user's file has the same form; its rows come before those that ship.
"""

from collections.abc import Mapping
from datetime import date
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ingot.errors import DataError, UsageError, unknown
from ingot.planning.data_file import read_data_file, validation_problem

FlopType = Literal["fp32", "fp16", "fp8", "int8", "fp4"]
SHIPPED = Path(__file__).with_name("hardware.yaml")
_MOST = 1e18
_Amount = Annotated[float, Field(gt=0, le=_MOST)]
_Rate = Annotated[float, Field(ge=0, le=_MOST)]


class Hardware(BaseModel):
    """One device; hardware.yaml describes the fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    words: str = Field(max_length=200)
    kind: Literal["gpu", "cpu", "tpu"]
    sm: int = Field(default=0, ge=0, le=999)
    memory: _Amount
    bandwidth: _Amount
    cache: _Rate = 0.0
    flops: Mapping[FlopType, _Amount] = Field(min_length=1)
    peer_link: _Rate = 0.0
    host_link: _Amount
    network: _Amount
    devices: int = Field(default=1, ge=1, le=1024)
    watts: _Rate = 0.0
    price_per_hour: _Amount | None = None
    checked: date | None = None
    sources: tuple[str, ...] = Field(min_length=1)

    @property
    def link(self) -> float:
        """Bytes a second and direction between two devices of a node."""
        return self.peer_link or self.host_link

    def peak(self, type_: FlopType) -> tuple[FlopType, float]:
        """Flops of a type; of the next wider one for a type without a row."""
        wider: Mapping[FlopType, FlopType] = {"fp4": "fp8", "fp8": "fp16", "int8": "fp16", "fp16": "fp32"}
        while type_ not in self.flops and type_ in wider:
            type_ = wider[type_]
        return (type_, self.flops[type_]) if type_ in self.flops else min(self.flops.items(), key=lambda item: item[1])

    def intensity(self, type_: FlopType) -> float:
        """Operations for each byte read from memory from which on arithmetic is what limits."""
        return self.peak(type_)[1] / self.bandwidth


class HardwareFile(BaseModel):
    """A file of rows, and the day on which they were checked."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    date: date
    rows: Mapping[str, Hardware] = Field(min_length=1, max_length=1000)


@cache
def read_hardware(file: Path) -> HardwareFile:
    """Read a file of rows. DataError names the file, the row and the field."""
    try:
        return HardwareFile.model_validate(read_data_file(file))
    except ValidationError as error:
        raise DataError(f"{file}: {validation_problem(error)}") from error


def hardware_rows(files: tuple[Path, ...] = ()) -> dict[str, Hardware]:
    """All rows by name; of several of one name, that of the first file."""
    rows: dict[str, Hardware] = {}
    for file in (*files, SHIPPED):
        rows = {**read_hardware(file).rows, **rows}
    return rows


def find_hardware(name: str, files: tuple[Path, ...] = ()) -> Hardware:
    """The row of that name. UsageError with the nearest names for another name."""
    rows = hardware_rows(files)
    found = rows.get(name.strip().lower().replace("_", "-").replace(" ", "-"))
    if found is None:
        raise UsageError(f"{unknown('hardware', name, sorted(rows))}; add a row of your own with --hardware FILE")
    return found
