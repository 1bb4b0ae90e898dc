"""The child process of tests that damage documents: damages one of a folder, uses the folder, prints what escaped.

    python -m tests.fuzz_worker USE FOLDER DOCUMENT SEED COUNT

USE is a row of USES. DOCUMENT is a JSON file of the folder, or a safetensors file, whose header is damaged. The result
is a JSON list of [damage, exception], of every exception that is not an IngotError. The address space is limited, so
that a size without a bound shows as a MemoryError. What Ingot loads all the same must take a step.
"""

import json
import resource
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from ingot.artifact import open_artifact
from ingot.artifact.programs.expert_choices import reached, read_expert_choices, read_expert_shares
from ingot.errors import IngotError
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.interchange.artifact_weights import weights_of_artifact
from ingot.pipeline.interchange.lint import lint_checkpoint
from ingot.pipeline.interchange.weight_sources import weights_of_checkpoint
from ingot.pipeline.model.importer import import_checkpoint
from ingot.runtime import Engine, SamplingParams
from tests.artifact.tiny_artifact import reseal, write_resealed
from tests.structural_fuzz import damages

ADDRESS_BYTES = 8 * 10**9  # enough to load the small models of tests many times over
MAX_MESSAGE = 2500
_MANIFEST = "manifest.json"


def run(folder: Path, verify: bool) -> None:
    """Load the artifact and compute a few tokens."""
    with Engine.load(open_artifact(folder, verify), kv_blocks=8, num_threads=1) as engine:
        engine.generate([1, 2, 3], SamplingParams(max_tokens=2, ignore_eos=True))


def export(folder: Path, verify: bool) -> None:
    """Read the artifact's weights back under the names of its configuration."""
    for weight in weights_of_artifact(open_artifact(folder, verify)):
        assert weight.shape


def build(folder: Path, verify: bool) -> None:
    """Read the checkpoint as a build does, as transcode does, and as lint does."""
    lint_checkpoint(folder)
    weights_of_checkpoint(Checkpoint.open(folder))
    import_checkpoint(Checkpoint.open(folder), context_tokens=64)


def experts(folder: Path, verify: bool) -> None:
    """Read the choices of experts as a plan does, and as ranks that divide them do."""
    artifact = open_artifact(folder, verify)
    choices = read_expert_choices(artifact)
    assert choices is None or 0 < reached(choices.reach, 5) <= 1
    assert all(abs(sum(shares) - 1) < 1e-9 for shares in read_expert_shares(artifact).values())


USES: dict[str, Callable[[Path, bool], None]] = {"run": run, "export": export, "build": build, "experts": experts}


def escaped(use: str, folder: Path, document: str, seed: int, count: int) -> Iterator[tuple[str, str]]:
    """Yield every damage whose exception is not an IngotError, with the exception."""
    original = _read(folder / document)
    for number, damage in enumerate(damages(original, seed, count)):
        with tempfile.TemporaryDirectory() as temporary:
            copy = Path(temporary) / "a"
            shutil.copytree(folder, copy)
            _write(copy / document, damage.text)
            if (copy / _MANIFEST).exists():
                _seal(copy, document, damage.text)
            problem = _problem(use, copy, verify=number % 2 == 0)
            if problem:
                yield str(damage), problem


def _problem(use: str, folder: Path, verify: bool) -> str:
    try:
        USES[use](folder, verify)
    except IngotError as error:
        text = str(error)
        return f"a message of {len(text)} characters: {text[:200]}" if len(text) > MAX_MESSAGE else ""
    except BaseException as error:  # noqa: BLE001  # Rust panics are BaseExceptions
        place = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {str(error)[:200]} ({place.filename}:{place.lineno})"
    return ""


def _read(file: Path) -> object:
    content = file.read_bytes()
    if file.suffix == ".safetensors":
        content = content[8 : 8 + int.from_bytes(content[:8], "little")]
    return json.loads(content)


def _write(file: Path, text: str) -> None:
    raw = text.encode("utf-8", "surrogatepass")
    if file.suffix == ".safetensors":
        content = file.read_bytes()
        rest = content[8 + int.from_bytes(content[:8], "little") :]
        raw = len(raw).to_bytes(8, "little") + raw + rest
    file.write_bytes(raw)


def _seal(folder: Path, document: str, text: str) -> None:
    """Make the digests right again, if the damaged text is one that Python's parser takes."""
    if document != _MANIFEST:
        reseal(folder)
        return
    try:
        write_resealed(folder, json.loads(text))
    except (ValueError, RecursionError):
        (folder / document).write_text(text)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_BYTES, ADDRESS_BYTES))
    print(json.dumps(list(escaped(sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5])))))
