"""What a recipe's target has against the rest of the recipe: cards, and precisions that its kernels do not read."""

from collections.abc import Iterator

from ingot.errors import Problem, UsageError
from ingot.passes.quantization.fp8 import Fp8
from ingot.passes.quantization.quantize_activations import QuantizeActivations
from ingot.passes.quantization.quantize_kv_cache import QuantizeKVCache
from ingot.pipeline.recipe import PassEntry, Recipe
from ingot.pipeline.recipe_yaml import Located
from ingot.pipeline.targets import FLOAT8_FROM, Target, get_target, require_kv_type


def target_problems(recipe: Located, passes: tuple[PassEntry, ...]) -> list[Problem]:
    """A target that there is none of, cards that it does not build for, keys and values that it does not read."""
    given = recipe.entries.get("target")
    name = Recipe.model_fields["target"].default if given is None else given.value
    if not isinstance(name, str):
        return []
    try:
        target = get_target(name)
    except UsageError as error:
        assert given is not None
        return [given.problem(str(error))]
    found = [*_sm_problems(recipe, target), *_kv_problems(recipe, target, passes)]
    return [*found, *_float8_problems(recipe, target, passes)]


def _given_sms(recipe: Located) -> tuple[Located | None, tuple[int, ...]]:
    """gpu.sms, and its numbers where it holds numbers."""
    gpu = recipe.entries.get("gpu")
    sms = gpu.entries.get("sms") if gpu else None
    if sms is None or not all(isinstance(item.value, int) for item in sms.items):
        return sms, ()
    return sms, tuple(int(str(item.value)) for item in sms.items)


def _sm_problems(recipe: Located, target: Target) -> Iterator[Problem]:
    sms, given = _given_sms(recipe)
    place = sms or recipe.entries.get("target") or recipe
    choice = ", ".join(map(str, target.sm_choice))
    if given and not target.sm_choice:
        fixed = f"builds for SM {target.sms[0]} alone" if target.sms else "builds for no card"
        yield place.problem(f"gpu.sms is {list(given)}, and target {target.name} {fixed}; take it out")
    elif target.sm_choice and not given:
        yield place.problem(
            f"target {target.name} builds for the cards in gpu.sms, which the recipe lacks; some of {choice}"
        )
    for sm in given if target.sm_choice else ():
        if sm not in target.sm_choice:
            yield place.problem(f"gpu.sms names {sm}; target {target.name} builds for {choice}.{_other_target(sm)}")


def _other_target(sm: int) -> str:
    try:
        return f" Target {get_target(f'cuda-sm{sm}').name} builds for SM {sm}"
    except UsageError:
        return ""


def _kv_problems(recipe: Located, target: Target, passes: tuple[PassEntry, ...]) -> Iterator[Problem]:
    for entry in passes:
        made = entry.make()
        if isinstance(made, QuantizeKVCache):
            try:
                require_kv_type(target, made.precision)
            except UsageError as error:
                yield recipe.entries["passes"].problem(f"passes: {error}")


def _float8_problems(recipe: Located, target: Target, passes: tuple[PassEntry, ...]) -> Iterator[Problem]:
    """Weights or activations of 8-bit floats for cards that have none."""
    too_old = [sm for sm in target.sms or _given_sms(recipe)[1] if sm < FLOAT8_FROM]
    for entry in passes if too_old else ():
        made = entry.make()
        if isinstance(made, Fp8) or (isinstance(made, QuantizeActivations) and made.dtype == "float8"):
            yield recipe.entries["passes"].problem(
                f"passes: {made.name} makes 8-bit floats, which need SM {FLOAT8_FROM} or newer, and target "
                f"{target.name} builds for SM {too_old[0]}; take 8-bit or 4-bit integers, or newer cards"
            )
