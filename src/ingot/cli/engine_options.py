"""`--set KEY=VALUE` of `ingot run` and `ingot serve`: options of `Engine.load`, instead of the artifact's defaults."""

from collections.abc import Mapping, Sequence

import yaml

from ingot.errors import UsageError, one_of, shown, unknown
from ingot.options import Option, options_of, read_option
from ingot.runtime.options import EngineOptions
from ingot.runtime.speculation_options import DRAFTERS, SpeculationOptions

_NULLS = ("null", "~")


def engine_options(
    settings: Sequence[str], speculate: str | None = None, processes: Mapping[str, int | None] | None = None
) -> dict[str, object]:
    """The options by name. Values are YAML: null is None, sizes may have units.

    speculate  the drafters of `--speculate`, which the options of drafts belong to
    processes  those of `--stages`, `--tensor-parallel` and `--expert-parallel`, by option

    Raises UsageError for an unknown name or a value that is not allowed.
    """
    of_engine, of_drafts = _keys(EngineOptions), _keys(SpeculationOptions)
    allowed = {**of_engine, **of_drafts}
    given: dict[str, object] = {}
    for setting in settings:
        name, separator, text = setting.partition("=")
        if not separator or not text.strip():
            raise UsageError(f"--set {shown(setting)} is not KEY=VALUE, such as kv_host_bytes=4GiB")
        if name not in allowed:
            raise UsageError(f"--set: {unknown('option', name, allowed, 'options')}")
        given[name] = _value(allowed[name], text.strip())
    options = {name: value for name, value in given.items() if name in of_engine}
    options |= {name: value for name, value in (processes or {}).items() if value}
    drafts = {name: value for name, value in given.items() if name in of_drafts}
    if speculate is not None:
        options["speculation"] = SpeculationOptions(speculate, **drafts)  # type: ignore[arg-type]  # it checks the types
    elif drafts:
        raise UsageError(
            f"--set {next(iter(drafts))}: there are no drafts without a drafter; add --speculate with one of"
            f" {one_of(DRAFTERS)}, or a draft artifact"
        )
    return options


def _keys(declaring: type) -> Mapping[str, Option]:
    """The options that do not have a flag of their own."""
    return {name: option for name, option in options_of(declaring).items() if not option.flag.name}


def _value(option: Option, text: str) -> object:
    try:
        return read_option(option, _parsed(option, text), full=True, plain=True)
    except yaml.YAMLError as error:
        raise UsageError(f"--set {option.name}: {shown(text)} is not a YAML value") from error
    except ValueError as error:
        raise UsageError(f"--set {error}") from error


def _parsed(option: Option, text: str) -> object:
    if option.reader and option.reader.is_text:
        return None if text in _NULLS else text
    if option.range and text.isdecimal():
        return int(text)
    return yaml.safe_load(text)
