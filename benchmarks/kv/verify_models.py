"""`ingot verify` on real models, with float and 4-bit weights and every precision of the KV cache.

    python -m benchmarks.kv.verify_models MODEL... --full MODEL --output benchmarks/results/verify-models.json

Builds each artifact into --folder, unless it is there, and verifies it in the quick form; the models of --full in
full where the KV cache has 32-bit floats. Prints a line for each, and what did not pass. Exit code 1 when a cell did
not pass.
"""

import json
import tempfile
import time
from hashlib import sha256
from pathlib import Path
from typing import Any, get_args

import click

from benchmarks.device import device_facts
from ingot.artifact import Artifact, open_artifact
from ingot.builder import build
from ingot.validation.verify import VerifyOptions, VerifyResult, open_subject, verify
from ingot.validation.verify.result import CellVerdict, failure_lines

PRECISIONS = ("float32", "float16", "bfloat16", "fp8", "int8", "int4", "k8v4")
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


def _passes(recipe: str, precision: str) -> str:
    names = [f"{{{name}}}" if ":" in name else name for name in _RECIPES[recipe].split(", ", 3)]
    if precision != "float32":
        names.append(f"{{quantize-kv-cache: {{precision: {precision}}}}}")
    return ", ".join([*names, "clean-up"])


def facts(recipe: str, model: Path, precision: str, result: VerifyResult, build_seconds: float) -> dict[str, Any]:
    """One row of the results."""
    return {
        "model": model.name,
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
@click.argument("models", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--full", multiple=True, type=click.Path(path_type=Path), help="A model that is verified in full.")
@click.option("--recipe", "recipes", multiple=True, type=click.Choice(list(_RECIPES)), default=list(_RECIPES))
@click.option("--precision", "precisions", multiple=True, type=click.Choice(PRECISIONS), default=PRECISIONS)
@click.option("--seed", default=0, show_default=True)
@click.option("--folder", type=click.Path(path_type=Path), default=Path(tempfile.gettempdir()) / "ingot-verify-models")
@click.option("--output", type=click.Path(path_type=Path), help="Write the results as JSON.")
def main(
    models: tuple[Path, ...],
    full: tuple[Path, ...],
    recipes: tuple[str, ...],
    precisions: tuple[str, ...],
    seed: int,
    folder: Path,
    output: Path | None,
) -> None:
    """Build, verify, print, write the JSON after each."""
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for model, recipe, precision in ((m, r, p) for m in models for r in recipes for p in precisions):
        started = time.monotonic()
        artifact = built(recipe, model, precision, folder)
        seconds = time.monotonic() - started
        is_quick = model not in full or precision != "float32"
        result = verify(open_subject(artifact), VerifyOptions(quick=is_quick, seed=seed))
        row = facts(recipe, model, precision, result, seconds)
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
