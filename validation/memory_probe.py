"""The child process of memory.py: loads an artifact, generates, and prints its own memory use as JSON.

    python -m ingot.validation.memory_probe [ARTIFACT PROMPT_TOKENS OUTPUT_TOKENS]      without: imports alone

Memory is read from /proc/self/status (Linux). Imports count in the measurement: keep them few.
"""

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ingot.artifact import open_artifact
from ingot.errors import EngineError
from ingot.validation.subject import EngineSubject

_STATUS = Path("/proc/self/status")
_FIELDS = {"peak_bytes": "VmHWM", "resident_bytes": "VmRSS", "private_bytes": "RssAnon", "mapped_bytes": "RssFile"}


@dataclass(frozen=True)
class ProcessMemory:
    """Peak bytes since the process started; resident bytes now, split into private pages and pages mapped from files.

    device_bytes    GPU memory, not included in the others
    """

    peak_bytes: int
    resident_bytes: int
    private_bytes: int
    mapped_bytes: int
    device_bytes: int = 0


def process_memory() -> ProcessMemory:
    """The memory of this process now. EngineError on systems without /proc (only Linux has it)."""
    try:
        return parse_status(_STATUS.read_text().splitlines())
    except OSError as error:
        raise EngineError(
            f"{_STATUS}: cannot read it, so peak memory cannot be measured on this system; turn memory off"
        ) from error


def parse_status(lines: Iterable[str]) -> ProcessMemory:
    """Parse lines such as "VmHWM:     1234 kB"."""
    values = {name: rest.split() for name, _, rest in (line.partition(":") for line in lines)}
    return ProcessMemory(**{field: int(values[key][0]) * 1024 for field, key in _FIELDS.items()})


def probe(artifact: Path, prompt_tokens: int, output_tokens: int) -> dict[str, dict[str, int]]:
    """Memory before loading the artifact, after it, and after generating.

    By default a KV pool on a GPU allocates all free memory, so there it is limited to what the generation needs. A pool
    on the CPU only occupies the pages that are written.
    """
    stages = imported()
    opened = open_artifact(artifact, verify=False)  # measure() has verified the digests
    needed = None if opened.manifest.on_cpu else prompt_tokens + output_tokens
    with EngineSubject.load(opened, needed) as subject:
        stages["loaded"] = _memory(subject)
        subject.submit([token % subject.vocab_size for token in range(prompt_tokens)], output_tokens)
        while not any(event.finished for event in subject.step()):
            pass
        stages["generated"] = _memory(subject)
    return stages


def imported() -> dict[str, dict[str, int]]:
    """Memory of a process that has imported the runtime."""
    return {"imported": asdict(process_memory())}


def _memory(subject: EngineSubject) -> dict[str, int]:
    device = subject.device
    return asdict(replace(process_memory(), device_bytes=device.used_bytes if device else 0))


if __name__ == "__main__":
    given = sys.argv[1:]
    print(json.dumps(probe(Path(given[0]), int(given[1]), int(given[2])) if given else imported()))
