"""Commands that read and write other tools' checkpoints: export, transcode, import, lint-checkpoint."""

import json
import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ingot.artifact import MANIFEST, open_artifact
from ingot.cli.command import given_words
from ingot.cli.set_shorthands import with_shorthands
from ingot.cli.terminal.console import print_json, print_line, print_note
from ingot.cli.terminal.progress_display import progress_shown
from ingot.errors import UsageError
from ingot.pipeline.interchange.export import export_artifact, export_checkpoint
from ingot.pipeline.interchange.import_ import RECIPE, Imported, import_foreign
from ingot.pipeline.interchange.lint import LintFinding, lint_checkpoint
from ingot.pipeline.interchange.transcode import Transcoded, transcode
from ingot.pipeline.interchange.writers.refusals import SchemeError
from ingot.pipeline.recipe.load import load_recipe
from ingot.sizes import format_bytes


def export_command(
    source: str,
    checkpoint: Path | None,
    calibration: Path | None,
    format_name: str,
    output: Path,
    overrides: tuple[str, ...],
    round_scales: bool,
    widen: bool,
    no_resume: bool,
    as_json: bool,
) -> None:
    """Write the weights of ARTIFACT, or those that RECIPE makes from its checkpoint, in another tool's format."""
    notes: list[str] = []
    overrides = with_shorthands(overrides, {"CHECKPOINT": checkpoint, "--calibration": calibration})
    with progress_shown(), _naming_what_works():
        options = {"round_scales": round_scales, "widen": widen}
        if (Path(source) / MANIFEST).is_file():
            _refuse_overrides(source, overrides)
            artifact = open_artifact(source)
            folder = export_artifact(artifact, output, format_name, **options, note=notes.append)
        else:
            recipe = load_recipe(source, overrides)
            folder = export_checkpoint(recipe, output, format_name, **options, resume=not no_resume, note=notes.append)
    if as_json:
        print_json({"path": str(folder), "format": format_name, "bytes": _size(folder), "notes": notes})
        return
    for text in notes:
        print_note(text)
    print_line(f"wrote {folder} ({format_name}, {format_bytes(_size(folder))})")


@contextmanager
def _naming_what_works() -> Iterator[None]:
    """Add to the refusal of a format the command that writes it nevertheless, if there is one."""
    try:
        yield
    except SchemeError as error:
        if not error.flags:
            raise
        words = [word for word in given_words() if word not in ("--widen", "--round-scales")]
        meant = shlex.join(["ingot", "export", *words, *error.flags])
        raise SchemeError(f"{error}. This writes it, the same values in another form:\n  {meant}") from error


def _refuse_overrides(artifact: str, overrides: tuple[str, ...]) -> None:
    if overrides:
        raise UsageError(
            f"{artifact} is an artifact, whose weights are fixed: --set {overrides[0]} can only change what a recipe "
            "makes; name the recipe instead, or leave it out"
        )


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def transcode_command(
    source: Path,
    format_name: str,
    output: Path,
    proof: Path | None,
    lossy: bool,
    floats: bool,
    dtype: str | None,
    as_json: bool,
) -> None:
    """Write the checkpoint SOURCE, a folder or a .gguf file, in another format without changing a weight."""
    if proof is not None:
        _require_writable(proof)
    with progress_shown():
        outcome = transcode(source, output, format_name, lossy=lossy, floats=floats, dtype=dtype)
    if proof is not None:
        proof.write_text(json.dumps({"source": str(source), **outcome.as_json()}, indent=2) + "\n", encoding="utf-8")
    if as_json:
        print_json({"source": str(source), **outcome.as_json()})
    else:
        _print_transcoded(outcome)


def _require_writable(proof: Path) -> None:
    """Refuse a place where no proof can be written, before the folder is written."""
    if proof.is_dir() or not proof.absolute().parent.is_dir():
        problem = "is a folder" if proof.is_dir() else f"there is no folder {proof.parent}"
        raise UsageError(f"--proof {proof}: {problem}; name a file in a folder that exists")


def _print_transcoded(outcome: Transcoded) -> None:
    proof, size = outcome.proof, format_bytes(_size(outcome.folder))
    for note in outcome.notes:
        print_line(f"note: {note}")
    for part in outcome.left_out:
        print_line(f"left out: {part}")
    where = f" in {proof.largest_in}, {proof.changed_tensors} tensors changed" if proof.changed_tensors else ""
    print_line(f"wrote {outcome.folder} ({outcome.target}, {size})")
    print_line(
        f"proof: {proof.tensors} tensors, {proof.elements:,} elements, largest difference "
        f"{proof.largest_difference:g}{where}"
    )
    print_line(f"weights of the source   sha256:{proof.source_digest}")
    print_line(f"weights as written      sha256:{proof.written_digest}")


def import_command(source: Path, output: Path, as_json: bool) -> None:
    """Check the checkpoint SOURCE, a folder or a .gguf file, and write it in one form with a recipe that builds it."""
    with progress_shown():
        outcome = import_foreign(source, output)
    if as_json:
        print_json(_as_json(source, outcome))
    else:
        _print_imported(outcome)


def _as_json(source: Path, outcome: Imported) -> dict[str, object]:
    return {
        "source": str(source),
        **outcome.transcoded.as_json(),
        "warnings": [vars(finding) for finding in outcome.warnings],
        "kept": outcome.kept,
        "floats": {reason: list(names) for reason, names in outcome.floats.items()},
        "recipe": str(outcome.transcoded.folder / RECIPE),
    }


def _print_imported(outcome: Imported) -> None:
    _print_findings(outcome.warnings)
    _print_transcoded(outcome.transcoded)
    print_line(f"an artifact keeps the codes of {outcome.kept} weights")
    for reason, names in outcome.floats.items():
        print_line(f"32-bit floats for {len(names)}, {names[0]} the first: {reason}")
    print_line(f"\n{outcome.transcoded.folder / RECIPE}:\n{outcome.recipe}")


def lint_checkpoint_command(checkpoint: Path, as_json: bool) -> int:
    """Check CHECKPOINT, a folder or a .gguf file: shapes, finite values, zero points, exclude lists, KV scales."""
    with progress_shown():
        findings = lint_checkpoint(checkpoint)
    errors = sum(finding.severity == "error" for finding in findings)
    if as_json:
        print_json([vars(finding) for finding in findings])
    else:
        _print_findings(findings)
        print_line(f"{checkpoint}: {_count(errors, 'error')}, {_count(len(findings) - errors, 'warning')}")
    return 1 if errors else 0


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _print_findings(findings: Iterable[LintFinding]) -> None:
    for finding in findings:
        print_line(f"{finding.severity}: {finding.where}: {finding.message}")
