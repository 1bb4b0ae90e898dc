"""Digests of what an artifact is built from, by which `ingot build --if-changed` finds that nothing has changed.

They are in evidence/inputs.json of an artifact, and of the evidence that a rejected build leaves. The identity does not
cover them.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ingot.artifact import Artifact, GateOutcome, open_artifact
from ingot.artifact.json_text import parse_json, read_limited
from ingot.errors import ArtifactError, naming_file
from ingot.pipeline.calibrate.journal import code_digest
from ingot.pipeline.compile import tool_versions
from ingot.pipeline.model.importer import ModelSource
from ingot.pipeline.recipe.schema import Recipe
from ingot.pipeline.targets.table import get_target

_INPUTS_FILE, _SUMMARY_FILE = "inputs.json", "summary.json"
_CODE = ("ingot.passes", "ingot.pipeline", "ingot.kernels", "ingot.builder", "ingot.validation", "ingot.runtime")


def input_digests(recipe: Recipe, source: ModelSource) -> dict[str, str]:
    """Return a digest of everything that a build reads, by name. Reads the whole checkpoint."""
    packages = [name for alternatives in get_target(recipe.target).packages for name in alternatives]
    tables = {"evaluation.text": recipe.evaluation_text(), "gpu.tiles": recipe.tile_table()}
    if recipe.calibration and any(each.needs_calibration for each in recipe.make_passes()):
        tables["calibration.text"] = recipe.calibration_text()
    files = {**source.checkpoint.tokenizer_files, **{key: file for key, file in tables.items() if file}}
    texts = {
        "recipe": recipe.resolved_yaml(with_serving=True),
        "tools": json.dumps([tool_versions(), _versions(packages)]),
        "ingot": code_digest(_CODE),
    }
    return {
        "checkpoint": source.checkpoint.digest,
        **{name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()},
        **{name: _digest(file) for name, file in files.items()},
    }


def write_inputs(digests: Mapping[str, str], folder: Path) -> None:
    """Write the digests to the folder of the evidence, which is created if it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _INPUTS_FILE).write_text(json.dumps(digests, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def sealed_from(folder: Path, digests: Mapping[str, str]) -> Artifact | None:
    """Return the artifact in a folder if it is whole and was built from these inputs."""
    if _read_object(folder / "evidence" / _INPUTS_FILE) != digests:
        return None
    try:
        return open_artifact(folder)
    except ArtifactError:
        return None


def rejected_from(folder: Path, digests: Mapping[str, str]) -> tuple[GateOutcome, ...]:
    """Return the gates by which a build from these inputs was rejected into the folder; none for other inputs."""
    evidence = folder / "evidence"
    if _read_object(evidence / _INPUTS_FILE) != digests:
        return ()
    gates = (_read_object(evidence / _SUMMARY_FILE) or {}).get("gates", ())
    try:
        return tuple(map(GateOutcome.model_validate, gates))
    except (TypeError, ValueError):
        return ()


def _read_object(file: Path) -> dict[str, Any] | None:
    try:
        value = parse_json(read_limited(file))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of those packages that are installed."""
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _digest(path: Path) -> str:
    """Return the SHA-256 of a file, or of the files in a folder with their places in it."""
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            with naming_file(file), file.open("rb") as stream:
                name = file.relative_to(path).as_posix()
                digest.update(f"{name}\0".encode() + hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()
