"""Memory of this process as Linux counts it. One source: /proc/self/status.

The child process that memory.py starts: load an artifact, generate a little, print what memory it took as JSON.

python -m ingot.validation.memory_probe ARTIFACT PROMPT_TOKENS OUTPUT_TOKENS
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


def probe(artifact: Path, prompt_tokens: int, output_tokens: int) -> dict[str, dict[str, int]]:
    """Memory before the load, after it and after a generation.

    A card's pool takes all that is free unless it is told how much: there it holds what the generation needs. On the
    CPU a pool costs what is written of it.
    """
    stages = {"imported": asdict(process_memory())}
    opened = open_artifact(artifact, verify=False)  # measure() has verified it
    needed = None if opened.manifest.engine == "onnxruntime" else prompt_tokens + output_tokens
    with EngineSubject.load(opened, needed) as subject:
        stages["loaded"] = _taken(subject)
        subject.submit([token % subject.vocab_size for token in range(prompt_tokens)], output_tokens)
        while not any(event.finished for event in subject.step()):
            pass
        stages["generated"] = _taken(subject)
    return stages


def _taken(subject: EngineSubject) -> dict[str, int]:
    device = subject.device
    return asdict(replace(process_memory(), device_bytes=device.used_bytes if device else 0))


if __name__ == "__main__":
    print(json.dumps(probe(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
