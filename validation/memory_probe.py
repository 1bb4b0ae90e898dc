"""The child process that memory.py starts: load an artifact, generate a little, print what memory it took as JSON.

python -m ingot.validation.memory_probe ARTIFACT PROMPT_TOKENS OUTPUT_TOKENS
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from ingot.artifact import open_artifact
from ingot.validation.engine_subject import EngineSubject
from ingot.validation.process_memory import process_memory


def probe(artifact: Path, prompt_tokens: int, output_tokens: int) -> dict[str, dict[str, int]]:
    """Memory before the load, after it and after a generation."""
    stages = {"imported": asdict(process_memory())}
    with EngineSubject.load(open_artifact(artifact, verify=False)) as subject:  # measure() has verified it
        stages["loaded"] = asdict(process_memory())
        subject.submit([token % subject.vocab_size for token in range(prompt_tokens)], output_tokens)
        while not any(event.finished for event in subject.step()):
            pass
        stages["generated"] = asdict(process_memory())
    return stages


if __name__ == "__main__":
    print(json.dumps(probe(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
