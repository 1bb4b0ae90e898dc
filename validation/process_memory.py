"""Memory of this process as Linux counts it. One source: /proc/self/status."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ingot.errors import EngineError

_STATUS = Path("/proc/self/status")
_FIELDS = {"peak_bytes": "VmHWM", "resident_bytes": "VmRSS", "private_bytes": "RssAnon", "mapped_bytes": "RssFile"}


@dataclass(frozen=True)
class ProcessMemory:
    """peak_bytes since the process began; of what is resident now, private pages and pages mapped from files.

    device_bytes    what it took of a card's memory, beside all that
    """

    peak_bytes: int
    resident_bytes: int
    private_bytes: int
    mapped_bytes: int
    device_bytes: int = 0


def process_memory() -> ProcessMemory:
    """Read it now. EngineError where there is no /proc (Linux alone has it)."""
    try:
        return parse_status(_STATUS.read_text().splitlines())
    except OSError as error:
        raise EngineError(
            f"{_STATUS}: cannot read it, so peak memory cannot be measured on this system; turn memory off"
        ) from error


def parse_status(lines: Iterable[str]) -> ProcessMemory:
    """Pick the fields out of the lines "VmHWM:     1234 kB"."""
    values = {name: rest.split() for name, _, rest in (line.partition(":") for line in lines)}
    return ProcessMemory(**{field: int(values[key][0]) * 1024 for field, key in _FIELDS.items()})
