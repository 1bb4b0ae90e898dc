"""Every mistake of a recipe at once, each with the place of its key.

Three kinds: the schema's (pydantic, in our words), the passes' (the passes themselves judge), and what ties keys
together (gates to metrics, metrics to the sections that measure them).

What a recipe's target has against the rest of the recipe: cards, and precisions that its kernels do not read.
"""

from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from ingot.artifact.metrics import METRICS, MetricFacts
from ingot.errors import Problem, UsageError, did_you_mean, one_of
from ingot.passes.registry import load_pass_class, make_pass
from ingot.pipeline.recipe.schema import LatencyOptions, PassEntry, Recipe
from ingot.pipeline.recipe.yaml import Located
from ingot.pipeline.targets.table import FLOAT8_FROM, Target, get_target, require_kv_type

_ALLOWED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "a text",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "dict_type": "a mapping of keys",
    "mapping_type": "a mapping of keys",
    "model_type": "a mapping of keys",
    "model_attributes_type": "a mapping of keys",
    "dataclass_type": "a path",
    "dataclass_exact_type": "a path",
    "is_instance_of": "a path",
    "greater_than_equal": "{ge} or more",
    "greater_than": "above {gt}",
    "less_than_equal": "{le} or less",
    "string_pattern_mismatch": "made of letters, digits, '.', '_' and '-', the first a letter or digit",
    "string_too_short": "a text of at least {min_length} character",
    "literal_error": "{expected}",
    "too_short": "a list of at least {min_length} value",
}


def schema_problems(error: ValidationError, recipe: Located) -> list[Problem]:
    """pydantic's findings, in words that name the key, its value and what is allowed."""
    return [_schema_problem(details, recipe) for details in error.errors()]


def _schema_problem(details: ErrorDetails, recipe: Located) -> Problem:
    path = details["loc"]
    place = recipe.at(path)
    key = ".".join(map(str, path))
    if details["type"] == "extra_forbidden":
        return place.problem(_unknown_key(path))
    if details["type"] == "missing":
        return place.problem(f"{key} is missing; it has no default")
    if details["type"] == "value_error":
        return place.problem(f"{key}: {details['ctx']['error']}")
    allowed = _ALLOWED[details["type"]].format(**details.get("ctx", {}))
    return place.problem(f"{key} is {_shown(details['input'])}; it must be {allowed}")


def _shown(value: object) -> str:
    """A value as a recipe would write it."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(_shown, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_shown(item)}' for key, item in value.items())}}}"
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else repr(value)


def _unknown_key(path: tuple[int | str, ...]) -> str:
    """Name the key, where it stands, the keys there, and the nearest."""
    key, where = str(path[-1]), ".".join(map(str, path[:-1]))
    known = list(_model_at(path[:-1]).model_fields)
    known += ["extends"] if not where else []
    place = f" in {where}" if where else ""
    return f"unknown key {key!r}{place}; keys: {one_of(known)}.{did_you_mean(key, known)}"


def _model_at(path: tuple[int | str, ...]) -> type[BaseModel]:
    """The model that the path leads to; the keys of a mapping such as `gates` all lead to that of its values."""
    model: type[BaseModel] = Recipe
    for key in path:
        field = model.model_fields.get(str(key))
        model = model if field is None else next(_models_in(field.annotation), model)
    return model


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The model classes of an annotation such as Model | None or Mapping[str, Model]."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


def gate_problems(recipe: Located) -> list[Problem]:
    """Gates on unknown metrics, with the bound on the wrong side, or that nothing measures."""
    gates = recipe.entries.get("gates")
    return [
        p for metric, gate in (gates.entries.items() if gates else ()) for p in _gate_problems(recipe, metric, gate)
    ]


def _gate_problems(recipe: Located, metric: str, gate: Located) -> Iterator[Problem]:
    name, separator, level = metric.partition("@")
    if name not in METRICS:
        near = did_you_mean(name, METRICS)
        yield gate.problem(f"gates: there is no metric {name!r}; metrics: {one_of(METRICS)}.{near}")
        return
    facts = METRICS[name]
    section = facts.section
    wrong = "min" if facts.better == "lower" else "max"
    if wrong in gate.entries:
        right = "max" if wrong == "min" else "min"
        message = f"gates: {metric} is the better the {facts.better} it is; write {right} instead of {wrong}"
        yield gate.entries[wrong].problem(message)
    if section and not _has(recipe, section):
        message = f"gates: {metric} is measured by the section `{section}`, which the recipe lacks; "
        message += "add it, or take the gate out with null"
        yield gate.problem(message)
    elif separator:
        yield from _level_problems(recipe, metric, level, facts, gate)


def calibration_problems(recipe: Located, passes: tuple[PassEntry, ...]) -> list[Problem]:
    """Passes that need calibration data in a recipe that gives none."""
    needing = [entry.name for entry in passes if entry.make().needs_calibration]
    if not needing or _has(recipe, "calibration"):
        return []
    message = f"passes: {needing[0]} needs the section `calibration`, which the recipe lacks; "
    message += "add it (calibration: {text: FILE}), or take the pass out"
    return [recipe.entries["passes"].problem(message)]


def scheme_problems(recipe: Located, passes: tuple[PassEntry, ...]) -> list[Problem]:
    """Passes that assign schemes to weights with no later pass that applies them."""
    made = [entry.make() for entry in passes]
    unused = [
        pass_
        for at, pass_ in enumerate(made)
        if pass_.assigns_schemes and not any(later.applies_schemes for later in made[at + 1 :])
    ]
    message = "passes: {} chooses bits for the pass that quantizes; put gptq or quantize-weights after it"
    return [recipe.entries["passes"].problem(message.format(pass_.name)) for pass_ in unused]


def _has(recipe: Located, section: str) -> bool:
    return section in recipe.entries and recipe.entries[section].value is not None


def _level_problems(recipe: Located, metric: str, level: str, facts: MetricFacts, gate: Located) -> Iterator[Problem]:
    """metric@level: only for metrics measured per concurrency, at a level that the recipe runs."""
    if facts.section != "latency":
        yield gate.problem(f"gates: {facts.name} is not measured per concurrency; write it without @{level}")
        return
    default = LatencyOptions.model_fields["concurrency"].default
    levels = recipe.entries["latency"].entries.get("concurrency")
    known = [str(value) for value in (default if levels is None else [item.value for item in levels.items])]
    if level not in known:
        yield gate.problem(f"gates: {metric} asks for a concurrency that latency does not run; levels: {one_of(known)}")


def read_passes(recipe: Located, problems: list[Problem]) -> tuple[PassEntry, ...]:
    """The list of passes; appends a problem for each entry that is none, and for each option that is wrong."""
    listed = recipe.entries.get("passes")
    if listed is None or listed.value is None:
        return ()
    if not isinstance(listed.value, tuple):
        problems.append(listed.problem(f"passes is {_shown(listed.plain())}; it must be a list of passes"))
        return ()
    entries = [_read_pass(item, problems) for item in listed.items]
    return tuple(entry for entry in entries if entry is not None)


def _read_pass(item: Located, problems: list[Problem]) -> PassEntry | None:
    """A name, or {name: {option: value}}; None (and its problems) when the pass cannot be made of it."""
    single = len(item.entries) == 1
    name, options = next(iter(item.entries.items())) if single else (item.value, None)
    given = options.entries if options else {}
    if not isinstance(name, str) or (options and not isinstance(options.value, dict | None)):
        shown = _shown(item.plain())
        place = options or item
        problems.append(place.problem(f"passes: {shown} is no pass; write NAME or NAME: {{option: value, ...}}"))
        return None
    found = _pass_problems(name, given, item)
    problems.extend(found)
    return None if found else PassEntry(name=name, options={key: value.plain() for key, value in given.items()})


def _pass_problems(name: str, options: Mapping[str, Located], item: Located) -> list[Problem]:
    """What the pass has against these options: each wrong one at its own place, else whatever is wrong of the whole."""
    try:
        load_pass_class(name)
    except UsageError as error:
        return [item.problem(f"passes: {error}")]
    whole = _refusal(name, {key: value.plain() for key, value in options.items()})
    if whole is None:
        return []
    alone = [(value, _refusal(name, {key: value.plain()})) for key, value in options.items()]
    return [value.problem(f"passes: {why}") for value, why in alone if why] or [item.problem(f"passes: {whole}")]


def _refusal(name: str, options: Mapping[str, object]) -> str | None:
    try:
        make_pass(name, options)
    except UsageError as error:
        return str(error)
    return None


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
        precision = entry.make().kv_precision
        if precision is not None:
            try:
                require_kv_type(target, precision)
            except UsageError as error:
                yield recipe.entries["passes"].problem(f"passes: {error}")


def _float8_problems(recipe: Located, target: Target, passes: tuple[PassEntry, ...]) -> Iterator[Problem]:
    """Weights or activations of 8-bit floats for cards that have none."""
    too_old = [sm for sm in target.sms or _given_sms(recipe)[1] if sm < FLOAT8_FROM]
    for entry in passes if too_old else ():
        made = entry.make()
        if made.needs_float8:
            yield recipe.entries["passes"].problem(
                f"passes: {made.name} makes 8-bit floats, which need SM {FLOAT8_FROM} or newer, and target "
                f"{target.name} builds for SM {too_old[0]}; take 8-bit or 4-bit integers, or newer cards"
            )
