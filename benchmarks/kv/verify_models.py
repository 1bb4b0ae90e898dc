"""`ingot verify` on real models, with float and 4-bit weights and every precision of the KV cache.

    python -m benchmarks.kv.verify_models MODEL... --full MODEL --output benchmarks/results/verify-models.json

Builds each artifact into --folder, unless it is there, and verifies it in the quick form; the models of --full in
full where the KV cache has 32-bit floats. Prints a line for each, and what did not pass. Exit code 1 when a cell did
not pass. Speculation with a draft model is verified for the models of --draft MODEL DRAFT.

    python -m benchmarks.kv.verify_models --synthetic deepseek_v3 --synthetic gemma4_text --precision float32

verifies families by small checkpoints with random weights, in full too: a case of tests/oracle, with the demo model's
tokenizer and a context that holds the requests. To make them takes torch and transformers (pip install --group oracle).
"""

import json
import shutil
import tempfile
import time
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any, get_args

import click

from benchmarks.device import device_facts
from benchmarks.paths import ROOT
from ingot.artifact import Artifact, open_artifact
from ingot.builder import build
from ingot.errors import unknown
from ingot.validation.verify import VerifyOptions, VerifyResult, open_subject, verify
from ingot.validation.verify.result import CellVerdict, failure_lines

PRECISIONS = ("float32", "float16", "bfloat16", "fp8", "int8", "int4", "k8v4")
_TOKENIZER = ROOT / "examples" / "models" / "stdlib-llama-6m"
_SYNTHETIC = {"vocab_size": 4096, "max_position_embeddings": 512}  # the demo model's tokenizer; 32 blocks
_UNMEASURED = ("evaluation=null", "latency=null", "generate=null", "gates={}")
_RECIPES = {
    "fp32-cpu": "fold-constants, pack-projections, fuse-gated-activation",
    "int4-cpu": "fold-constants, pack-projections, fuse-gated-activation, quantize-weights: {bits: 4, block_size: 32}",
}


def built(recipe: str, model: Path, precision: str, folder: Path) -> Artifact:
    """The model's artifact with this precision of the KV cache; built once for a folder and a checkpoint's files."""
    key = sha256("".join(f"{file.name} {file.stat().st_mtime_ns}" for file in sorted(model.iterdir())).encode())
    path = folder / f"{model.name}-{recipe}-{precision}-{key.hexdigest()[:8]}"
    if not path.exists():
        build(recipe, [f"checkpoint={model}", *_UNMEASURED, f"passes=[{_passes(recipe, precision)}]"], path)
    return open_artifact(path)


def synthetic_checkpoint(name: str, folder: Path) -> Path:
    """The checkpoint of a case of tests/oracle, with the demo model's vocabulary and more context; made once."""
    from tests.oracle import make_fixtures  # needs torch and transformers
    from tests.oracle.all_cases import ALL_CASES

    target = folder / f"synthetic-{name}"
    if not target.exists():
        cases = {case.name: case for case in ALL_CASES}
        if name not in cases:
            raise click.UsageError(f"--synthetic: {unknown('case', name, cases, 'cases')}")
        half_made, config = target.with_suffix(".part"), {**cases[name].config, **_SYNTHETIC}
        make_fixtures.make_checkpoint(replace(cases[name], config=config), half_made)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(_TOKENIZER / file, half_made)
        half_made.rename(target)
    return target


def _passes(recipe: str, precision: str) -> str:
    names = [f"{{{name}}}" if ":" in name else name for name in _RECIPES[recipe].split(", ", 3)]
    if precision != "float32":
        names.append(f"{{quantize-kv-cache: {{precision: {precision}}}}}")
    return ", ".join([*names, "clean-up"])


def facts(
    recipe: str, model: Path, precision: str, draft: Path | None, result: VerifyResult, build_seconds: float
) -> dict[str, Any]:
    """One row of the results."""
    return {
        "model": model.name,
        "draft": draft.name if draft else None,
        "recipe": recipe,
        "kv_precision": precision,
        "identity": result.identity,
        "form": "quick" if result.quick else "full",
        "seed": result.seed,
        "logits": result.logits,
        "verdict": result.verdict,
        "cells": {verdict: result.count(verdict) for verdict in get_args(CellVerdict)},
        "not_passed": failure_lines(result),
        "seconds": result.seconds,
        "build_seconds": round(build_seconds, 1),
    }


@click.command(help=__doc__)
@click.argument("models", nargs=-1, type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--full", multiple=True, type=click.Path(path_type=Path), help="A model that is verified in full.")
@click.option("--synthetic", multiple=True, help="A case of tests/oracle, verified in full too.")
@click.option(
    "--draft",
    "drafts",
    multiple=True,
    nargs=2,
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    metavar="MODEL DRAFT",
    help="A model and another with the same tokenizer, which drafts for it in 32-bit floats.",
)
@click.option("--recipe", "recipes", multiple=True, type=click.Choice(list(_RECIPES)), default=list(_RECIPES))
@click.option("--precision", "precisions", multiple=True, type=click.Choice(PRECISIONS), default=PRECISIONS)
@click.option("--seed", default=0, show_default=True)
@click.option("--folder", type=click.Path(path_type=Path), default=Path(tempfile.gettempdir()) / "ingot-verify-models")
@click.option("--output", type=click.Path(path_type=Path), help="Write the results as JSON.")
def main(
    models: tuple[Path, ...],
    full: tuple[Path, ...],
    synthetic: tuple[str, ...],
    drafts: tuple[tuple[Path, Path], ...],
    recipes: tuple[str, ...],
    precisions: tuple[str, ...],
    seed: int,
    folder: Path,
    output: Path | None,
) -> None:
    """Build, verify, print, write the JSON after each."""
    folder.mkdir(parents=True, exist_ok=True)
    made = tuple(synthetic_checkpoint(name, folder) for name in synthetic)
    models, full = models + made, full + made
    if not models:
        raise click.UsageError("no models; give the folder of one, or --synthetic")
    draft_of = {model.resolve(): draft for model, draft in drafts}
    rows: list[dict[str, Any]] = []
    for model, recipe, precision in ((m, r, p) for m in models for r in recipes for p in precisions):
        started = time.monotonic()
        artifact, draft = built(recipe, model, precision, folder), draft_of.get(model.resolve())
        draft_path = built("fp32-cpu", draft, "float32", folder).path if draft else None
        seconds = time.monotonic() - started
        is_quick = model not in full or precision != "float32"
        result = verify(open_subject(artifact, draft=draft_path), VerifyOptions(quick=is_quick, seed=seed))
        row = facts(recipe, model, precision, draft, result, seconds)
        rows.append(row)
        click.echo(f"{model.name} {recipe} KV {precision}: {result.verdict}, {row['cells']}, {result.seconds:.0f} s")
        for line in row["not_passed"]:
            click.echo(f"    {line}")
        if output is not None:
            output.write_text(json.dumps({"device": device_facts(), "results": rows}, indent=1) + "\n", "utf-8")
    if any(row["verdict"] != "PASS" for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
