"""Reads the variants that a choice is made from: a model as each of several recipes would build it, with KV as the
recipe stores it and in 8 bits.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ingot.artifact import MANIFEST
from ingot.builder.plan_subject import read_subject
from ingot.errors import IngotError, UsageError
from ingot.passes.quantization.quantize_kv_cache import QuantizeKVCache
from ingot.pipeline.recipe.load import load_recipe
from ingot.pipeline.recipe.schema import Recipe
from ingot.pipeline.targets.table import TARGETS
from ingot.planning.choice.configuration import RecipeVariant

PLAIN = {"gpu": ("fp16-cuda", "int4-cuda"), "cpu": ("fp32-cpu", "int8-cpu", "int4-cpu")}
"""By kind of hardware, recipes that need no calibration text. Those with it store the same bytes in the same types."""
_SMALLER_KV = "int8"
_LAST = "clean-up"


@dataclass(frozen=True)
class ReadVariants:
    """Variants, and why others could not be planned: name -> reason."""

    variants: tuple[RecipeVariant, ...]
    left_out: dict[str, str]


def read_variants(
    what: str, checkpoint: Path | None, recipes: Sequence[str], overrides: Sequence[str], kinds: Sequence[str]
) -> ReadVariants:
    """Plan WHAT by each recipe.

    recipes     names or files; () for those of `PLAIN`, or for WHAT where it is a recipe
    overrides   KEY=VALUE for all of them
    kinds       kinds of hardware, for `PLAIN`

    UsageError where no recipe can be planned, with the first one's reason.
    """
    if (Path(what) / MANIFEST).is_file():
        return ReadVariants((RecipeVariant("", (), read_subject(what, overrides=overrides)),), {})
    place = checkpoint or Path(what)
    if checkpoint is not None:
        recipes = (what, *recipes)
    if not place.exists():
        raise UsageError(f"{what} is not a checkpoint or a config.json; for a recipe, name one with --checkpoint")
    names = recipes or tuple(name for kind in kinds for name in PLAIN.get(kind, ()))
    found: list[RecipeVariant] = []
    left_out: dict[str, str] = {}
    for name in dict.fromkeys(names):
        given = (f"checkpoint={place}", *overrides)
        for further in _with_smaller_kv(name, given):
            try:
                subject = read_subject(str(place), name, [*overrides, *further])
            except IngotError as error:
                left_out[" ".join((name, *(_SMALLER_KV for _ in further)))] = str(error)
            else:
                found.append(RecipeVariant(name, (*overrides, *further), subject))
    if not found:
        raise UsageError(f"none of the recipes {', '.join(names)} can be planned: {next(iter(left_out.values()))}")
    return ReadVariants(tuple(found), left_out)


def _with_smaller_kv(name: str, overrides: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield no further overrides, then those that store KV in 8 bits, unless the recipe has a type for it."""
    yield ()
    recipe = load_recipe(name, overrides)
    types = TARGETS[recipe.target].kv_types if recipe.target in TARGETS else ()
    if _SMALLER_KV in types and not any(isinstance(made, QuantizeKVCache) for made in recipe.make_passes()):
        yield (_passes_with(recipe, {QuantizeKVCache.name: {"precision": _SMALLER_KV}}),)


def _passes_with(recipe: Recipe, further: dict[str, dict[str, str]]) -> str:
    """The override that adds a pass before the last clean-up."""
    passes: list[object] = [{one.name: dict(one.options)} if one.options else one.name for one in recipe.passes]
    at = len(passes) - 1 if passes and passes[-1] == _LAST else len(passes)
    return f"passes={json.dumps([*passes[:at], further, *passes[at:]])}"
