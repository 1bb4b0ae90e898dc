"""Kinds of paths on the command line: artifact, checkpoint or recipe; and the command that fits each.

A command that is given the wrong one of them is refused with the command that was probably meant. Only names of files
are looked at, so that the check is quick and needs no packages.
"""

import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ingot.errors import LONGEST_PATH, NAME_PATTERN, UsageError, did_you_mean, shown, shown_path

Kind = Literal["artifact", "checkpoint", "recipe", "rejected", "weights", "folder", "file", "missing"]

RECIPES = Path(__file__).parents[1] / "recipes"
_MANIFEST, _CONFIG, _RECIPE = "manifest.json", "config.json", "recipe.yaml"
_MOST_SIBLINGS = 200  # names that are compared for a near one
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILES: dict[str, Kind] = {".gguf": "checkpoint", ".safetensors": "weights", ".yaml": "recipe", ".yml": "recipe"}

_CHECKPOINT = "a checkpoint is a folder with config.json, or a .gguf file"
_WORDS: dict[Kind, str] = {
    "artifact": "an artifact",
    "checkpoint": "a checkpoint",
    "recipe": "a recipe",
    "rejected": "the evidence of a build that a gate rejected",
    "weights": "one file of a checkpoint",
    "folder": "a folder without manifest.json or config.json",
    "file": "a file",
}


@dataclass(frozen=True)
class CommandLine:
    """The words of a command, from which the command that was meant is made."""

    command: str
    words: tuple[str, ...]

    def with_words(self, replacements: dict[str, Sequence[str]], command: str | None = None) -> str:
        """The command line with each of these words, at its first use, replaced by others."""
        left, words = dict(replacements), list[str]()
        for word in self.words:
            words.extend(left.pop(word, [word]))
        return shlex.join(["ingot", command or self.command, *words])


def kind_of(path: str) -> Kind:
    """Return what is at the path; a path that no file system can hold is missing."""
    try:
        place = Path(path).expanduser()
        if place.is_dir():
            return _kind_of_folder(place)
        if not place.is_file():
            return "missing"
    except (OSError, ValueError, RuntimeError):  # too long, with a NUL, ~ of an unknown user
        return "missing"
    return _FILES.get(place.suffix, "file")


def _kind_of_folder(folder: Path) -> Kind:
    if (folder / _MANIFEST).is_file():
        return "artifact"
    if folder.name.endswith(".rejected") and (folder / _RECIPE).is_file():
        return "rejected"
    if (folder / _CONFIG).is_file() or next(folder.glob("*.safetensors"), None):
        return "checkpoint"
    return "folder"


def is_shipped_recipe(name: str) -> bool:
    """Whether a recipe of this name ships."""
    return name in shipped_recipes()


def shipped_recipes() -> list[str]:
    """Names of the recipes that ship, sorted."""
    return sorted(file.stem for file in RECIPES.glob("*.yaml"))


def check_build(line: CommandLine, given: Mapping[str, Any]) -> None:
    """Refuse a wrong RECIPE and a wrong checkpoint, whether it is an argument or set by --set."""
    recipe, checkpoint = str(given["recipe"]), given.get("checkpoint")
    _refuse_wrong_recipe(line, recipe, str(checkpoint) if checkpoint else None)
    if checkpoint is not None:
        _refuse_wrong_checkpoint(line, str(checkpoint))
    for override in given["overrides"]:
        key, _, value = override.partition("=")
        if key.strip() == "checkpoint" and (kind_of(value) in ("artifact", "rejected", "weights") or _is_hub_id(value)):
            _refuse_wrong_checkpoint(line, value, f"{key}=")


def check_artifact_or_recipe(line: CommandLine, given: Mapping[str, Any]) -> None:
    """Refuse a SOURCE that is neither an artifact nor a recipe."""
    if kind_of(str(given["source"])) != "artifact":
        check_build(line, {**given, "recipe": given["source"]})


def check_compared(line: CommandLine, given: Mapping[str, Any]) -> None:
    """Refuse what is neither a recipe nor an artifact, and what is not a checkpoint."""
    for source in given["sources"]:
        if kind_of(source) != "artifact":
            _refuse_wrong_recipe(line, source, None)
    for checkpoint in given["checkpoints"]:
        _refuse_wrong_checkpoint(line, str(checkpoint))


def named_artifact(given: str) -> tuple[str | None, str]:
    """Return the name and the folder of NAME=FOLDER; None without a name. A folder may have = in its path."""
    name, separator, path = given.partition("=")
    if not separator or os.path.exists(given) or "/" in name:
        return None, given
    if not re.fullmatch(NAME_PATTERN, name) or not path:
        raise UsageError(
            f"{shown(given)} is not NAME=FOLDER: a name has letters, digits, dots, dashes and underscores, such as"
            " chat=artifacts/chat"
        )
    return name, path


def check_artifact(line: CommandLine, given: Mapping[str, Any]) -> None:
    """Refuse an ARTIFACT, a --checkpoint or a --baseline that is something else, and the two interchanged."""
    _refuse_wrong_artifact(line, str(given["artifact"]))
    for option, other, wrong in _INTERCHANGED:
        path, exchange = given.get(option[2:]), other[2:] in given
        if path is not None and exchange and kind_of(str(path)) == wrong:
            meant = line.with_words({option: [other], f"{option}={path}": [f"{other}={path}"]})
            raise UsageError(f"{option} {shown_path(path)} is {_WORDS[kind_of(str(path))]}; use {other}:\n  {meant}")
    for option, refuse in (("checkpoint", _refuse_wrong_checkpoint), ("baseline", _refuse_wrong_artifact)):
        path = given.get(option)
        if path is not None and kind_of(str(path)) != "folder":  # what is missing in it is said by the reader
            refuse(line, str(path))


def check_foreign(line: CommandLine, given: Mapping[str, Any]) -> None:
    """Refuse a source of lint-checkpoint, transcode or import that is not another tool's checkpoint."""
    source = str(given.get("checkpoint") or given["source"])
    if kind_of(source) == "artifact" and line.command == "lint-checkpoint":
        raise _refusal(source, "artifact", "a checkpoint", [("check it", ["validate", source])])
    if kind_of(source) == "artifact" and line.command == "transcode":
        meant = line.with_words({}, command="export")
        raise UsageError(f"{shown_path(source)} is an artifact, not a checkpoint; write its weights:\n  {meant}")
    if kind_of(source) != "folder":  # what is missing in it is said by the reader
        _refuse_wrong_checkpoint(line, source)


def check_served(line: CommandLine, given: Mapping[str, Any]) -> None:
    """Refuse what is neither an artifact nor can be built: a checkpoint, or a recipe that names one."""
    for each in (str(given["artifact"]), *given["more_artifacts"]):
        _, path = named_artifact(each)
        if to_build(path) is None:
            _refuse_wrong_artifact(line, path)


def to_build(path: str) -> list[str] | None:
    """Return the arguments of `ingot build` for a checkpoint or a recipe that names one; None for anything else."""
    kind = kind_of(path)
    if kind == "checkpoint":
        return _to_build(path)
    is_recipe = kind == "recipe" or (kind in ("missing", "folder", "file") and is_shipped_recipe(path))
    return [path] if is_recipe and _names_checkpoint(path) else None


_INTERCHANGED = (("--checkpoint", "--baseline", "artifact"), ("--baseline", "--checkpoint", "checkpoint"))
Check = Callable[[CommandLine, Mapping[str, Any]], None]
CHECKS: dict[str, Check] = {
    "recipe": check_build,
    "artifact or recipe": check_artifact_or_recipe,
    "artifact": check_artifact,
    "artifact to serve": check_served,
    "artifacts or recipes": check_compared,
    "checkpoint": check_foreign,
}


def _refuse_wrong_recipe(line: CommandLine, recipe: str, checkpoint: str | None) -> None:
    if is_shipped_recipe(recipe) and kind_of(recipe) != "artifact":
        return
    kind = kind_of(recipe)
    if kind == "artifact":
        again = ["build", str(Path(recipe) / _RECIPE), checkpoint or "CHECKPOINT", "-o", "NEW-FOLDER"]
        uses = [("run it", ["run", recipe]), ("build it again from its checkpoint", again)]
        raise _refusal(recipe, kind, "a recipe", uses)
    if kind == "rejected":
        raise _rejected(recipe)
    if kind in ("checkpoint", "weights"):
        folder = recipe if kind == "checkpoint" else str(Path(recipe).parent)
        other = checkpoint if checkpoint and _is_recipe(checkpoint) else None
        replaced: dict[str, Sequence[str]] = {recipe: [other, folder] if other else _to_build(folder)}
        meant = line.with_words(replaced | ({other: []} if other else {}))
        raise UsageError(f"{shown_path(recipe)} is {_WORDS[kind]}, not a recipe; name a recipe first:\n  {meant}")
    if kind == "folder":
        raise UsageError(f"{shown_path(recipe)} is {_WORDS[kind]}: neither a recipe nor a checkpoint")
    if kind == "missing" and _FILES.get(Path(recipe).suffix) in ("checkpoint", "weights"):
        raise UsageError(f"{shown_path(recipe)}: no such file; {_CHECKPOINT}, and follows the name of a recipe")
    if kind == "missing" and _is_hub_id(recipe):
        raise _not_downloaded(recipe, line.with_words({recipe: ["int4-cpu", recipe.partition("/")[2]]}))


def _refuse_wrong_checkpoint(line: CommandLine, checkpoint: str, key: str = "") -> None:
    """`key` is what precedes the path in its word of the command line, such as checkpoint=."""
    kind = kind_of(checkpoint)
    if kind == "checkpoint":
        return
    if kind == "artifact":
        export = ["export", checkpoint, "--to", "safetensors", "-o", "NEW-FOLDER"]
        raise _refusal(checkpoint, kind, "a checkpoint", [("write its weights as a checkpoint", export)])
    if kind == "rejected":
        raise _rejected(checkpoint)
    if kind == "weights":
        folder = str(Path(checkpoint).parent)
        meant = line.with_words({key + checkpoint: [key + folder]})
        raise UsageError(f"{shown_path(checkpoint)} is {_WORDS[kind]}; name its folder:\n  {meant}")
    if kind == "missing" and _is_hub_id(checkpoint):
        folder = checkpoint.partition("/")[2]
        raise _not_downloaded(checkpoint, line.with_words({key + checkpoint: [key + folder]}))
    if kind == "missing":
        near = did_you_mean(Path(checkpoint).name, _siblings(checkpoint, "checkpoint"))
        raise UsageError(f"{shown_path(checkpoint)}: no such checkpoint; {_CHECKPOINT}.{near}")
    raise UsageError(f"{shown_path(checkpoint)} is {_WORDS[kind]}; {_CHECKPOINT}")


def _refuse_wrong_artifact(line: CommandLine, artifact: str) -> None:
    kind = kind_of(artifact)
    if kind in ("checkpoint", "weights"):
        folder = artifact if kind == "checkpoint" else str(Path(artifact).parent)
        output = f"artifacts/{Path(folder).absolute().name.removesuffix('.gguf')}"
        build = shlex.join(["ingot", "build", *_to_build(folder), "-o", output])
        meant = line.with_words({artifact: [output]})
        raise UsageError(
            f"{shown_path(artifact)} is {_WORDS[kind]}, not an artifact; build it first:\n  {build}\n  {meant}"
        )
    if kind == "recipe" or (kind == "missing" and is_shipped_recipe(artifact)):
        raise _recipe_for_artifact(line, artifact)
    if kind == "rejected":
        raise _rejected(artifact)
    if kind == "missing" and _is_hub_id(artifact):
        folder = artifact.partition("/")[2]
        output = f"artifacts/{folder}"
        build = shlex.join(["ingot", "build", "int4-cpu", folder, "-o", output])
        raise _not_downloaded(artifact, f"{build}\n  {line.with_words({artifact: [output]})}")
    if kind == "missing" and "/" not in artifact and kind_of(f"artifacts/{artifact}") == "artifact":
        meant = line.with_words({artifact: [f"artifacts/{artifact}"]})
        raise UsageError(f"{shown_path(artifact)}: no such artifact here, but artifacts/{artifact} is one:\n  {meant}")
    if kind == "missing":
        near = did_you_mean(Path(artifact).name, _siblings(artifact, "artifact"))
        build = f"ingot build {Path(artifact).name}" if is_shipped_recipe(Path(artifact).name) else "ingot build"
        raise UsageError(f"{shown_path(artifact)}: no such artifact; `{build}` makes one.{near}")


def _recipe_for_artifact(line: CommandLine, recipe: str) -> UsageError:
    """The refusal of a recipe where its artifact is meant; its usual output may be there already."""
    output = f"artifacts/{Path(recipe).stem}"
    words = ["ingot", "build", recipe, *([] if _names_checkpoint(recipe) else ["CHECKPOINT"]), "-o", output]
    build = "" if kind_of(output) == "artifact" else f"\n  {shlex.join(words)}"
    advice = "build it, and name the artifact" if build else "name the artifact"
    return UsageError(
        f"{shown_path(recipe)} is a recipe, not an artifact; {advice}:{build}\n  {line.with_words({recipe: [output]})}"
    )


def _names_checkpoint(recipe: str) -> bool:
    """Whether the recipe's own file, not one that it extends, has the key checkpoint."""
    file = RECIPES / f"{recipe}.yaml" if is_shipped_recipe(recipe) else Path(recipe)
    try:
        return re.search(r"^checkpoint:", file.read_text(encoding="utf-8"), re.MULTILINE) is not None
    except (OSError, ValueError):
        return False


def _refusal(path: str, kind: Kind, wanted: str, uses: Sequence[tuple[str, list[str]]]) -> UsageError:
    """Return the refusal of a path, with the commands that use it and their effects."""
    lines = [(shlex.join(["ingot", *words]), what) for what, words in uses]
    width = max(len(command) for command, _ in lines)
    text = "".join(f"\n  {command:<{width}}  # {what}" for command, what in lines)
    return UsageError(f"{shown_path(path)} is {_WORDS[kind]}, not {wanted}:{text}")


def _rejected(folder: str) -> UsageError:
    report = Path(folder) / "evidence/report.html"
    what = f"{shown_path(folder)} is {_WORDS['rejected']}: there is no artifact"
    return UsageError(f"{what}. See {report}; change the recipe and build again")


def _not_downloaded(name: str, then: str) -> UsageError:
    folder = name.partition("/")[2]
    return UsageError(
        f"{shown(name)} is not a path here. Ingot downloads nothing; if it is a model on Hugging Face, get it first:\n"
        f"  hf download {shlex.quote(name)} --local-dir {shlex.quote(folder)}\n  {then}"
    )


def _is_hub_id(text: str) -> bool:
    """Whether a path that does not exist may be the name of a model on Hugging Face, owner/model."""
    is_name = _HUB_ID.fullmatch(text) is not None and len(text) <= LONGEST_PATH and Path(text).suffix not in _FILES
    return is_name and not text.startswith("artifacts/") and not Path(text).parent.is_dir()


def _is_recipe(text: str) -> bool:
    return is_shipped_recipe(text) or kind_of(text) == "recipe"


def _to_build(checkpoint: str) -> list[str]:
    """Recipe and checkpoint to suggest: the recipe that `ingot import` wrote with it, or one that ships."""
    own = Path(checkpoint) / _RECIPE
    return [str(own)] if own.is_file() else [_recipe_for(checkpoint), checkpoint]


def _recipe_for(checkpoint: str) -> str:
    """A recipe that ships: one that keeps the codes if the checkpoint is quantized already."""
    config = Path(checkpoint) / _CONFIG
    try:
        is_quantized = checkpoint.endswith(".gguf") or b'"quantization_config"' in config.read_bytes()
    except OSError:
        is_quantized = False
    return "fp32-cpu" if is_quantized else "int4-cpu"


def _siblings(path: str, kind: Kind) -> list[str]:
    """Names of the entries next to a path that are of this kind."""
    try:
        entries = sorted(Path(path).expanduser().absolute().parent.iterdir())[:_MOST_SIBLINGS]
    except (OSError, ValueError, RuntimeError):
        return []
    return [entry.name for entry in entries if kind_of(str(entry)) == kind]
