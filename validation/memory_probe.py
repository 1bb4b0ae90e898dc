"""The child process that memory.py starts: load an artifact, generate a little, print what memory it took as JSON.

python -m ingot.validation.memory_probe ARTIFACT PROMPT_TOKENS OUTPUT_TOKENS
"""

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

from ingot.artifact import open_artifact
from ingot.validation.engine_subject import EngineSubject
from ingot.validation.process_memory import process_memory


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
