"""Turns a recipe's YAML values into a Recipe, or reports every mistake at the line of its key.

Each kind of mistake has one judge: the schema checks keys and types (pydantic, worded here), every pass checks its own
options, and consistency.py compares keys with each other.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from ingot.errors import Problem, UsageError, near_or_all, shown
from ingot.passes.registry import load_pass_class, make_pass
from ingot.pipeline.recipe.consistency import consistency_problems
from ingot.pipeline.recipe.schema import MOST_PASSES, Recipe
from ingot.pipeline.recipe.sections import PassEntry, RecipePath
from ingot.pipeline.recipe.yaml import Located
from ingot.planning.service_levels import LevelBounds, find_service_level

Keys = tuple[int | str, ...]

_ALLOWED = {  # pydantic's error type -> what is allowed
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "a string",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "dict_type": "a mapping of keys",
    "mapping_type": "a mapping of keys",
    "model_type": "a mapping of keys",
    "model_attributes_type": "a mapping of keys",
    "dataclass_type": "a path",
    "dataclass_exact_type": "a path",
    "is_instance_of": "a path",
    "string_pattern_mismatch": "made of letters, digits, '.', '_' and '-', the first a letter or digit",
    "string_too_short": "a string of at least {min_length} character",
    "string_too_long": "a string of at most {max_length} characters",
    "literal_error": "{expected}",
    "too_short": "a list of at least {min_length} value",
    "too_long": "a list of at most {max_length} values",
}
_OUT_OF_RANGE = ("greater_than_equal", "greater_than", "less_than_equal", "less_than")
_LONGEST_KEY = 80
_LIMITS = {"ttft": "ttft_seconds", "tpot": "tpot_seconds", "end_to_end": "e2e_seconds"}
"""Bound of a service level -> key of latency.slo."""


def check_recipe(located: Located, default_name: str, problems: list[Problem]) -> Recipe | None:
    """The recipe with its defaults filled in; None, with every mistake appended to `problems`, when it has any."""
    located = _with_own_gates(_without_null_gates(_with_verify_gate(located)))
    located = _with_service_level(located, problems)
    passes = _read_passes(located, problems)
    problems.extend(consistency_problems(located, passes))
    for path in _path_keys(Recipe):
        located = _with_recipe_path(located, path)
    values = {key: item.plain() for key, item in located.entries.items()}
    try:
        recipe = Recipe.model_validate({"name": default_name, **values, "passes": passes})
    except ValidationError as error:
        problems.extend(_schema_problem(details, located) for details in error.errors() if _is_mistake(details))
        return None
    return None if problems else recipe.with_places(located)


def _path_keys(model: type[BaseModel], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The keys of every path in the schema, such as ("evaluation", "text")."""
    for name, field in model.model_fields.items():
        if RecipePath in _types_in(field.annotation):
            yield (*prefix, name)
        for section in _models_in(field.annotation):
            yield from _path_keys(section, (*prefix, name))


def _with_recipe_path(located: Located, keys: tuple[str, ...]) -> Located:
    """Replace the string under these keys by a RecipePath; the schema refuses anything else."""
    key, *rest = keys
    inner = located.entries.get(key)
    if inner is None:
        return located
    if rest:
        changed = _with_recipe_path(inner, tuple(rest))
    else:
        changed = replace(inner, value=RecipePath(inner.value, inner.folder)) if isinstance(inner.value, str) else inner
    return replace(located, value={**located.entries, key: changed})


def _without_null_gates(located: Located) -> Located:
    """Drop gates written as `metric: null`, which remove a gate of the extended recipe."""
    gates = located.entries.get("gates")
    if gates is None or not isinstance(gates.value, dict | None):
        return located
    kept = {metric: gate for metric, gate in gates.entries.items() if gate.value is not None}
    return replace(located, value={**located.entries, "gates": replace(gates, value=kept)})


def _with_verify_gate(located: Located) -> Located:
    """Read `verify: true` among the gates as the limit 0 on what `verify` measures, and false as null.

    A gate on it adds the section `verify` where the recipe does not have it.
    """
    gates = located.entries.get("gates")
    gate = gates.entries.get("verify") if gates else None
    if gates is None or gate is None or gate.value is None:
        return located
    if isinstance(gate.value, bool):
        limit = {"max": replace(gate, value=0)} if gate.value else None
        gates = replace(gates, value={**gates.entries, "verify": replace(gate, value=limit)})
    added = {} if "verify" in located.entries or gate.value is False else {"verify": replace(gate, value={})}
    return replace(located, value={**located.entries, **added, "gates": gates})


def _with_service_level(located: Located, problems: list[Problem]) -> Located:
    """Read the name of a service level as its numbers, in latency.slo and as the gate `slo`, which sets latency.slo.

    The load stays that of the recipe. Names that cannot be read are dropped, with a problem.
    """
    latency, gates = located.entries.get("latency"), located.entries.get("gates")
    objective = latency.entries.get("slo") if latency else None
    of_gates = {key: gate for key, gate in (gates.entries if gates else {}).items() if _is_level_gate(key, gate)}
    names = [*of_gates.values()]
    if objective is not None and isinstance(objective.value, str):
        names.append(objective)
    if not names:
        return located
    level = _level_of(names, latency, objective, problems)
    place = names[-1]
    if latency is not None and isinstance(latency.value, dict):
        bounds = level.bounds if level else {}
        limits = {_LIMITS[name]: replace(place, value=seconds) for name, seconds in bounds.items()}
        slo = replace(place, value=limits or None)
        latency = replace(latency, value={**latency.entries, "slo": slo})
    if gates is not None:
        share = replace(place, value=level.percentile) if level else None
        read = {key: replace(gate, value={"min": share}) for key, gate in of_gates.items()} if share else {}
        kept = {key: gate for key, gate in gates.entries.items() if key not in of_gates}
        gates = replace(gates, value={**kept, **read})
    changed = {"latency": latency, "gates": gates}
    return replace(located, value={**located.entries, **{key: item for key, item in changed.items() if item}})


def _is_level_gate(key: str, gate: Located) -> bool:
    return key.partition("@")[0] == "slo" and isinstance(gate.value, str)


def _level_of(
    names: Sequence[Located], latency: Located | None, objective: Located | None, problems: list[Problem]
) -> LevelBounds | None:
    """The one level that is named; None, with a problem appended, for an unknown or second one, or without a load."""
    found: dict[object, LevelBounds] = {}
    for name in names:
        try:
            found[name.value] = find_service_level(str(name.value))
        except UsageError as error:
            problems.append(name.problem(str(error)))
            return None
    first, level = next(iter(found.items()))
    given = objective.value if objective else None
    if len(found) > 1 or (given is not None and not isinstance(given, str)):
        problems.append(
            names[0].problem(
                f"gates: slo is {first}, and latency.slo is another objective; there is one for all gates: remove one, "
                "or write the gate as slo: {min: SHARE}"
            )
        )
        return None
    if latency is None or latency.value is None:
        problems.append(
            names[0].problem(
                f"gates: slo is {first}, and the recipe measures no latency; add the section latency with the load, as "
                f"in latency: {{prompt_tokens: {level.prompt_tokens}, output_tokens: {level.output_tokens}}}, or remove"
                " the gate with null"
            )
        )
        return None
    return level


def _with_own_gates(located: Located) -> Located:
    """Drop an inherited `if_measured` from gates with a limit of the recipe's own, which must then be measured."""
    gates = located.entries.get("gates")
    if gates is None:
        return located
    own = {metric: _with_own_limit(gate) for metric, gate in gates.entries.items()}
    return replace(located, value={**located.entries, "gates": replace(gates, value=own)}) if own else located


def _with_own_limit(gate: Located) -> Located:
    entries = gate.entries
    conditional = entries.get("if_measured")
    limits = [entries[bound] for bound in ("max", "min") if bound in entries]
    if conditional is None or all(limit.file == conditional.file for limit in limits):
        return gate
    return replace(gate, value={key: value for key, value in entries.items() if key != "if_measured"})


def _is_mistake(details: ErrorDetails) -> bool:
    """Whether it is more than a consequence: pydantic also calls a list too short whose only value is wrong."""
    return not (details["type"] == "too_short" and details["input"])


def _schema_problem(details: ErrorDetails, recipe: Located) -> Problem:
    """One of pydantic's errors in words that name the key, its value and what is allowed."""
    path = details["loc"]
    place = recipe.at(path)
    key = _dotted(path)
    if details["type"] == "extra_forbidden":
        return place.problem(_unknown_key(path))
    if details["type"] == "missing":
        return place.problem(f"{key} is missing; it has no default")
    if details["type"] == "value_error":
        return place.problem(f"{key}: {details['ctx']['error']}")
    return place.problem(f"{key} is {_shown(details['input'])}; it must be {_allowed(details)}")


def _allowed(details: ErrorDetails) -> str:
    """Describe the allowed values of the key; numbers with their range."""
    field = _field_at(details["loc"])
    bounds = _range(field.annotation, field.metadata) if field else ""
    if details["type"] in _OUT_OF_RANGE:
        return bounds
    words = _ALLOWED.get(details["type"])
    if words is None:
        return details["msg"]
    numeric = details["type"] in ("int_type", "int_from_float", "float_type", "finite_number")
    return words.format(**details.get("ctx", {})) + (f" {bounds}" if numeric and bounds else "")


def _range(annotation: Any, metadata: Sequence[object] = ()) -> str:
    """The range of a number, or of the numbers of a list, in words; empty for one without bounds."""
    found = {}
    for item in (*metadata, *_metadata_in(annotation)):
        for bound in ("ge", "gt", "le", "lt"):
            if (limit := getattr(item, bound, None)) is not None:
                found[bound] = limit
    match found:
        case {"ge": least, "le": most}:
            return f"from {least} to {most}"
        case {"gt": above, "le": most}:
            return f"above {above}, up to {most}"
        case {"ge": least}:
            return f"{least} or more"
        case {"gt": above}:
            return f"above {above}"
    return ""


def _metadata_in(annotation: Any) -> Iterator[object]:
    """The constraints in an annotation such as tuple[Annotated[int, Field(ge=1)], ...]."""
    for extra in getattr(annotation, "__metadata__", ()):
        yield from extra.metadata if isinstance(extra, FieldInfo) else (extra,)
    for argument in get_args(annotation):
        yield from _metadata_in(argument)


def _shown(value: object) -> str:
    """A value as a recipe would write it, cut if it is long."""
    text = _written(value)
    return text if len(text) <= 2 * _LONGEST_KEY else f"{text[: 2 * _LONGEST_KEY]}..."


def _written(value: object) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_written, value[:_LONGEST_KEY]))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_cut(key)}: {_written(item)}' for key, item in value.items())}}}"
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else shown(value)


def _dotted(path: Keys) -> str:
    """A path of keys as messages name it."""
    return ".".join(_cut(str(key)) for key in path)


def _cut(key: str) -> str:
    return key if len(key) <= _LONGEST_KEY and key.isprintable() else shown(key)


def _unknown_key(path: Keys) -> str:
    """Name the key, its section, the section's keys and the nearest of them."""
    key, where = str(path[-1]), _dotted(path[:-1])
    allowed = list(_model_at(path[:-1]).model_fields)
    allowed += ["extends"] if not where else []
    place = f" in {where}" if where else ""
    return f"unknown key {shown(key)}{place}{near_or_all(key, allowed, 'keys')}"


def _field_at(path: Keys) -> FieldInfo | None:
    """The field that the path leads to, or to a value in it."""
    model: type[BaseModel] = Recipe
    field: FieldInfo | None = None
    for key in path:
        if (inner := model.model_fields.get(str(key))) is not None:
            field = inner
            model = next(_models_in(field.annotation), model)
    return field


def _model_at(path: Keys) -> type[BaseModel]:
    """The model that the path leads to; each key of a mapping such as `gates` leads to the model of its values."""
    field = _field_at(path)
    return Recipe if field is None else next(_models_in(field.annotation), Recipe)


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The model classes of an annotation such as Model | None or Mapping[str, Model]."""
    return (found for found in _types_in(annotation) if issubclass(found, BaseModel))


def _types_in(annotation: Any) -> Iterator[type]:
    if isinstance(annotation, type):
        yield annotation
    for argument in get_args(annotation):
        yield from _types_in(argument)


def _read_passes(recipe: Located, problems: list[Problem]) -> tuple[PassEntry, ...]:
    """The valid entries of `passes`; appends a problem for each invalid entry and each invalid option."""
    listed = recipe.entries.get("passes")
    if listed is None or listed.value is None:
        return ()
    if not isinstance(listed.value, tuple):
        problems.append(listed.problem(f"passes is {_shown(listed.plain())}; it must be a list of passes"))
        return ()
    if len(listed.items) > MOST_PASSES:
        problems.append(listed.problem(f"passes has {len(listed.items):,} passes; it may have up to {MOST_PASSES}"))
        return ()
    entries = [_read_pass(item, problems) for item in listed.items]
    return tuple(entry for entry in entries if entry is not None)


def _read_pass(item: Located, problems: list[Problem]) -> PassEntry | None:
    """Read a name, or {name: {option: value}}; None, with its problems appended, for an invalid entry."""
    single = len(item.entries) == 1
    name, options = next(iter(item.entries.items())) if single else (item.value, None)
    given = options.entries if options else {}
    if not isinstance(name, str) or (options and not isinstance(options.value, dict | None)):
        place, given_text = options or item, _shown(item.plain())
        problems.append(
            place.problem(f"passes: {given_text} is not a pass; write NAME or NAME: {{option: value, ...}}")
        )
        return None
    found = _pass_problems(name, given, item)
    problems.extend(found)
    return None if found else PassEntry(name=name, options={key: value.plain() for key, value in given.items()})


def _pass_problems(name: str, options: Mapping[str, Located], item: Located) -> list[Problem]:
    """Each option that is wrong on its own, at its line; otherwise what is wrong with the options together."""
    try:
        load_pass_class(name)
    except UsageError as error:
        return [item.problem(f"passes: {error}")]
    together = _refusal(name, {key: value.plain() for key, value in options.items()})
    if together is None:
        return []
    alone = [(value, _refusal(name, {key: value.plain()})) for key, value in options.items()]
    return [value.problem(f"passes: {why}") for value, why in alone if why] or [item.problem(f"passes: {together}")]


def _refusal(name: str, options: Mapping[str, object]) -> str | None:
    try:
        make_pass(name, options)
    except UsageError as error:
        return str(error)
    return None
