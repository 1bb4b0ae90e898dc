"""Artifacts for what `ingot serve` is given: a checkpoint, or a recipe that names one, is built once.

A checkpoint is built by the default recipe into the cache, by its path, and again when one of its files has changed. A
recipe is built into artifacts/NAME, as `ingot build` would without -o, and an artifact that is there is served.
"""

import hashlib
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from ingot.cli.compiler.init_demo import fetch_source
from ingot.cli.sources import RECIPES, kind_of, to_build
from ingot.cli.terminal.output import output
from ingot.errors import BuildError
from ingot.pipeline.recipe.shipped import source_only
from ingot.progress import note
from ingot.settings import cache_dir, make_cache_dir

_STDERR = 2


def artifact_of(path: str) -> str:
    """Return the artifact for a path: itself, or what is built of it. BuildError where that does not succeed."""
    words = to_build(path)
    if words is None:
        return path
    if kind_of(path) == "checkpoint":
        place = _place_of(Path(path))
        if not _is_current(place, Path(path)):
            _build(words, place, path)
        return str(place)
    place = Path("artifacts") / Path(path).stem
    if kind_of(str(place)) != "artifact":
        _build(_with_source(words), place, path)
    return str(place)


def needs_build(path: str) -> bool:
    """Return whether `artifact_of` will build, which takes minutes."""
    if to_build(path) is None:
        return False
    if kind_of(path) == "checkpoint":
        return not _is_current(_place_of(Path(path)), Path(path))
    return kind_of(str(Path("artifacts") / Path(path).stem)) != "artifact"


def _place_of(checkpoint: Path) -> Path:
    """Return the folder of a checkpoint's artifact: two of the same name have different paths."""
    real = checkpoint.expanduser().resolve()
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", real.name.removesuffix(".gguf")).strip("._-")[:100]
    return cache_dir() / "artifacts" / hashlib.sha256(bytes(real)).hexdigest()[:16] / (name or "model")


def _is_current(artifact: Path, checkpoint: Path) -> bool:
    """Return whether the artifact was sealed after every file of the checkpoint was written, or put in its place."""
    if kind_of(str(artifact)) != "artifact":
        return False
    checkpoint = checkpoint.expanduser()
    files = [checkpoint] if checkpoint.is_file() else [checkpoint, *checkpoint.rglob("*")]
    sealed = (artifact / "manifest.json").stat().st_mtime_ns
    return all(max(status.st_mtime_ns, status.st_ctime_ns) < sealed for status in map(Path.stat, files))


def _with_source(words: Sequence[str]) -> list[str]:
    """Return the words of a build, where the recipe is one in Ingot's source if its checkpoint is only there."""
    recipe, *more = words
    file = RECIPES / f"{recipe}.yaml"
    given = yaml.safe_load(file.read_text(encoding="utf-8")).get("checkpoint") if file.is_file() else None
    if given is None or source_only((RECIPES.resolve() / given).resolve()) is None:
        return list(words)
    folder = make_cache_dir("source") / "ingot"
    if not folder.exists():
        fetch_source(folder)
    return [str(folder / "recipes" / f"{recipe}.yaml"), *more]


def _build(words: Sequence[str], place: Path, given: str) -> None:
    """Build in a process of its own, whose memory is free again when the server starts."""
    note(f"building {given} into {place}, once; `ingot build --help` has what can be set and measured")
    quiet = ["-q"] if output.quiet else []
    command = [sys.executable, "-m", "ingot", "build", *words, "-o", str(place), *quiet]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=_STDERR, check=False)
    if done.returncode:
        reason = f"for the reason above (exit code {done.returncode})"
        raise BuildError(f"{given} was not built, {reason}; nothing is served")
