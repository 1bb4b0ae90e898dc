"""Every family by every shipped recipe for CPUs, as `ingot build RECIPE CHECKPOINT --eval TEXT --calibration TEXT`.

    python -m benchmarks.family_recipes --output benchmarks/results/family-recipes.json

The checkpoints are those of tests/fixtures with a tokenizer of single characters. No engine is named, so that
`cpu.engine: auto` chooses it. Latency, memory and gates are off, since random weights of 32 columns say nothing about
them. The artifact then generates 8 tokens, and its logits of a prompt are compared with those of fp32-cpu. Each cell
ends as one of:

ran       finite logits, with a relative error below 1 to those of fp32-cpu
refused   one IngotError, whose message is recorded
failed    any other exception, a process that died, or other logits

A run that was stopped goes on where it was: cells in the output are kept. --again runs those that did not run.
"""

import json
import shutil
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models

from benchmarks.device import device_facts
from benchmarks.paths import CHECKPOINTS, ROOT
from ingot.artifact import Artifact
from ingot.builder import build
from ingot.cli.set_shorthands import with_shorthands
from ingot.errors import IngotError
from ingot.pipeline.compile import tool_versions
from ingot.pipeline.recipe.load import load_recipe
from ingot.pipeline.recipe.shipped import list_recipes
from ingot.runtime import Engine, SamplingParams

BASELINE = "fp32-cpu"
UNMEASURED = ("latency=null", "memory=null", "gates={}")
# Padded to blocks of 128, rows of 32 columns take 20 bits a weight: at that size mixed-precision keeps all in 16 bits.
_NARROW_BLOCKS = ("passes.mixed-precision.same_size_as={bits: 4, block_size: 32}",)
NARROW = dict.fromkeys(("int4-mixed-cpu", "int4-mixed-distill-cpu"), _NARROW_BLOCKS)
GENERATED = SamplingParams(max_tokens=8, ignore_eos=True)
PROMPT = tuple(range(10, 30))
_TEXT = ROOT / "examples" / "models" / "stdlib-llama-6m" / "heldout.txt"
_EVALUATION_CHARACTERS, _CALIBRATION_CHARACTERS = 1_000, 20_000
_SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")


@dataclass(frozen=True)
class Cell:
    """The end of one build.

    engine   the engine of the artifact; fallback: why it is not Ingot's own
    error    relative error of the prompt's logits to those of fp32-cpu
    message  of the refusal or the failure, with the checkpoint's folder as CHECKPOINT
    """

    end: str
    engine: str = ""
    fallback: str = ""
    error: float | None = None
    message: str = ""


def recipes() -> list[str]:
    """The shipped recipes for CPUs that name no checkpoint, the baseline first."""
    loaded = ((name, load_recipe(name)) for name, _ in list_recipes())
    names = [name for name, recipe in loaded if recipe.target == "cpu" and recipe.checkpoint is None]
    return sorted(names, key=lambda name: (name != BASELINE, name))


def checkpoints() -> list[str]:
    """The tiny checkpoints: every family and its variants."""
    return sorted(file.parent.name for file in CHECKPOINTS.glob("*/config.json"))


class FamilyRecipes:
    """Builds cells in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        text = _TEXT.read_text(encoding="utf-8")
        self._evaluation, self._calibration = folder / "evaluation.txt", folder / "calibration.txt"
        self._evaluation.write_text(text[:_EVALUATION_CHARACTERS], encoding="utf-8")
        self._calibration.write_text(text[_EVALUATION_CHARACTERS:][:_CALIBRATION_CHARACTERS], encoding="utf-8")
        self._expected = cache(self._logits_of_baseline)

    def cell(self, checkpoint: str, recipe: str) -> Cell:
        """Build the recipe from the checkpoint and run it."""
        source = self._copy(checkpoint)
        try:
            return self._run(checkpoint, source, recipe)
        except IngotError as error:
            message = str(error).replace(str(source), "CHECKPOINT")
            return Cell("failed" if _has_defect(error) else "refused", message=message)
        # Any other exception is a defect, which the record is for.
        except Exception as error:  # noqa: BLE001
            place = traceback.extract_tb(error.__traceback__)[-1]
            file = Path(place.filename).name
            return Cell("failed", message=f"{type(error).__name__}: {error} ({file}, {place.name})")

    def _run(self, checkpoint: str, source: Path, recipe: str) -> Cell:
        artifact, fallback = self._build(source, recipe)
        logits, engine = _run_artifact(artifact), artifact.manifest.engine
        expected = logits if recipe == BASELINE else self._expected(checkpoint)
        if logits.shape != expected.shape or not np.isfinite(logits).all():
            return Cell("failed", engine, fallback, message=f"logits {list(logits.shape)}, finite or not")
        error = float(np.linalg.norm(logits - expected) / np.linalg.norm(expected))
        return Cell("ran" if error < 1 else "failed", engine, fallback, round(error, 5))

    def _logits_of_baseline(self, checkpoint: str) -> NDArray[np.float32]:
        return _run_artifact(self._build(self._copy(checkpoint), BASELINE)[0])

    def _build(self, source: Path, recipe: str) -> tuple[Artifact, str]:
        """The artifact, and why it is not for Ingot's own engine."""
        given = {"CHECKPOINT": source, "--eval": self._evaluation, "--calibration": self._calibration}
        overrides = with_shorthands((*UNMEASURED, *NARROW.get(recipe, ())), given)
        result = build(recipe, overrides, self.folder / "artifact", resume=False, force=True)
        return result.artifact, str(result.compiled.pass_facts.get("cpu-engine", {}).get("reason", ""))

    def _copy(self, checkpoint: str) -> Path:
        target = self.folder / checkpoint
        if not target.exists():
            shutil.copytree(CHECKPOINTS / checkpoint, target, ignore=shutil.ignore_patterns("logits.npz"))
            write_tokenizer(target / "tokenizer.json")
        return target


def write_tokenizer(file: Path) -> None:
    """Write a tokenizer of the printable ASCII characters: 101 tokens, of which the first four are special."""
    characters = [*map(chr, range(32, 127)), "\n", "\t"]
    vocabulary = {token: number for number, token in enumerate((*_SPECIAL, *characters))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.add_special_tokens(list(_SPECIAL))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(file))


def _run_artifact(artifact: Artifact) -> NDArray[np.float32]:
    """Generate 8 tokens; return the prompt's logits, [tokens, vocab_size]."""
    with Engine.load(artifact) as engine:
        (done,) = engine.generate([list(PROMPT)], GENERATED, keep_logits=True)
        assert done.logits is not None
        assert len(done.token_ids) == GENERATED.max_tokens == len(done.logits)
        assert np.isfinite(done.logits).all()
        return engine.prompt_logits(list(PROMPT))


def _has_defect(error: BaseException) -> bool:
    """Return whether an exception that is not Ingot's own caused it, as where a pass dies."""
    cause = error.__cause__
    return cause is not None and (not isinstance(cause, IngotError | OSError) or _has_defect(cause))


def _cells(record: Mapping[str, Mapping[str, Mapping[str, object]]]) -> Iterator[Mapping[str, object]]:
    for row in record.values():
        yield from row.values()


@click.command(help=__doc__)
@click.option("--output", type=click.Path(path_type=Path), required=True)
@click.option("--recipe", "only_recipes", multiple=True, help="recipes to run; all without one")
@click.option("--checkpoint", "only_checkpoints", multiple=True, help="checkpoints to run; all without one")
@click.option("--again", is_flag=True, help="run cells that were refused or failed again")
def main(output: Path, only_recipes: tuple[str, ...], only_checkpoints: tuple[str, ...], again: bool) -> None:
    """Run the cells that the output lacks, and count all."""
    document = json.loads(output.read_text("utf-8")) if output.exists() else {"cells": {}}
    record: dict[str, dict[str, dict[str, object]]] = document["cells"]
    with tempfile.TemporaryDirectory() as folder:
        runner = FamilyRecipes(Path(folder))
        # Recipe by recipe, so that a run that is stopped has each family.
        for recipe in only_recipes or recipes():
            for checkpoint in only_checkpoints or checkpoints():
                row = record.setdefault(checkpoint, {})
                if recipe in row and not (again and row[recipe]["end"] != "ran"):
                    continue
                row[recipe] = asdict(Cell("failed", message="the process died"))
                _write(output, record)
                row[recipe] = asdict(runner.cell(checkpoint, recipe))
                click.echo(f"{checkpoint} {recipe}: {row[recipe]}")
        _write(output, record)


def _write(output: Path, record: dict[str, dict[str, dict[str, object]]]) -> None:
    messages = Counter(f"{cell['end']}: {cell['message']}" for cell in _cells(record) if cell["message"])
    document = {
        "device": device_facts(),
        "ingot": tool_versions(),
        "checkpoints": len(record),
        "ends": Counter(str(cell["end"]) for cell in _cells(record)),
        "engines": Counter(str(cell["engine"]) for cell in _cells(record) if cell["engine"]),
        "messages": dict(messages.most_common()),
        "cells": {name: dict(sorted(row.items())) for name, row in sorted(record.items())},
    }
    unfinished = output.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(output)


if __name__ == "__main__":
    main()
