"""Builds and measures the candidates of a comparison, one after another, in a folder from which it resumes.

    FOLDER/CHECKPOINT/NAME-DIGEST/             the artifact of a recipe
    FOLDER/CHECKPOINT/NAME-DIGEST.measured/    its measurement: measured.json with what it is valid for, and evidence/

A candidate is built again only if a build would make another artifact, and measured again only if the artifact, the
baseline, the text, the options or the machine differ. Both appear under their names when they are complete.
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ingot.artifact import Artifact, open_artifact
from ingot.builder.baseline import baseline_artifact
from ingot.builder.compare.candidates import UNMEASURED, ComparedModel, Group
from ingot.builder.flow import build, unchanged
from ingot.builder.measurements import origin_of
from ingot.builder.prediction import Predictor
from ingot.errors import IngotError, UsageError, naming_file, shown_path
from ingot.progress import note
from ingot.validation.evidence import BuildNotes, measure, sealed_quantization, write_evidence
from ingot.validation.evidence_json import Recorded, read_recorded
from ingot.validation.machine import environment
from ingot.validation.prediction import PREDICTION_FILE, Prediction, read_prediction
from ingot.validation.windows import read_text

LOCK, _VALID_FOR = "comparison.lock", "measured.json"


@dataclass(frozen=True)
class Outcome:
    """A candidate that was built and measured, or the error that prevented it."""

    candidate: ComparedModel
    artifact: Artifact | None = None
    recorded: Recorded | None = None
    evidence: Path | None = None
    prediction: Prediction | None = None
    error: IngotError | None = None


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder for one comparison. UsageError while another process holds it."""
    with naming_file(folder):
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("a+", encoding="utf-8")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            holder = file.read(20).strip()
            process = f" (process {holder})" if holder.isdecimal() else ""
            raise UsageError(
                f"{shown_path(folder)}: another comparison{process} works in this folder; wait for it, or name another"
                " with --state FOLDER"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def run_group(group: Group, folder: Path) -> list[Outcome]:
    """Build and measure the candidates of one checkpoint that the folder does not have yet.

    A candidate that cannot be built or measured is an outcome with its error; the others go on.
    """
    place, outcomes = folder / group.name, list[Outcome]()
    baseline: Path | None = None
    for candidate in group.candidates:
        try:
            artifact = candidate.artifact or _built(candidate, place / candidate.key)
            if baseline is None:
                recipe = candidate.recipe.for_engine(artifact.manifest.engine)
                baseline = baseline_artifact(recipe, group.source)
            outcomes.append(_measured(group, candidate, artifact, baseline, place / f"{candidate.key}.measured"))
        except IngotError as error:
            note(f"{group.name}/{candidate.name}: {error}")
            outcomes.append(Outcome(candidate, error=error))
    return outcomes


def _built(candidate: ComparedModel, target: Path) -> Artifact:
    """Build without measuring, unless the folder has what would be built."""
    overrides = (*candidate.overrides, *UNMEASURED)
    last = unchanged(candidate.source, overrides, target)
    if last and last.artifact:
        return last.artifact
    note(f"building {target}")
    return build(candidate.source, overrides, target).artifact


def _measured(group: Group, candidate: ComparedModel, artifact: Artifact, baseline: Path, target: Path) -> Outcome:
    evidence = target / "evidence"
    valid_for = _valid_for(group, artifact, baseline)
    if _read(target / _VALID_FOR) != valid_for:
        note(f"measuring {target}")
        _measure(group, candidate, artifact, baseline, target, valid_for)
    prediction = evidence / PREDICTION_FILE
    return Outcome(
        candidate,
        artifact,
        read_recorded(evidence),
        evidence,
        read_prediction(prediction) if prediction.is_file() else None,
    )


def _measure(
    group: Group, candidate: ComparedModel, artifact: Artifact, baseline: Path, target: Path, valid_for: dict[str, Any]
) -> None:
    predictor = Predictor() if candidate.artifact else Predictor.of_size(candidate.recipe, group.source)
    notes = BuildNotes(
        quantization=sealed_quantization(artifact),
        origin=origin_of(candidate.recipe, group.source),
        prediction=predictor.predict(artifact.path, group.options),
    )
    found = measure(artifact.path, baseline, group.options, notes)
    staged = target.with_name(f".{target.name}")
    shutil.rmtree(staged, ignore_errors=True)
    write_evidence(replace(found, gates=()), staged / "evidence")
    (staged / _VALID_FOR).write_text(json.dumps(valid_for, indent=1) + "\n", encoding="utf-8")
    shutil.rmtree(target, ignore_errors=True)
    staged.rename(target)


def _valid_for(group: Group, artifact: Artifact, baseline: Path) -> dict[str, Any]:
    """Everything that a measurement depends on."""
    options, machine = group.options, environment(group.options.num_threads)
    assert options.text is not None
    settings = {name: value for name, value in asdict(options).items() if name != "text"}
    facts = {name: machine[name] for name in ("cpu", "cores_available", "threads", "packages")}
    digest = hashlib.sha256(json.dumps([settings, facts], sort_keys=True, default=str).encode()).hexdigest()
    return {
        "artifact": artifact.manifest.identity,
        "baseline": open_artifact(baseline, verify=False).manifest.identity,
        "text": read_text(options.text)[1],
        "options_and_machine": digest,
    }


def _read(file: Path) -> object:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
