"""`--set KEY=VALUE` of `ingot run` and `ingot serve`: options of `Engine.load`, instead of the artifact's defaults."""

from collections.abc import Sequence

import yaml
from pydantic import ValidationError

from ingot.artifact.serving import ServingOptions, parse_bytes
from ingot.errors import UsageError, shown, unknown
from ingot.runtime.speculation.options import SpeculationOptions

_PATH = "kv_disk_path"  # a folder of this machine, so no artifact has a default
_DRAFT_BYTES = "draft_kv_bytes"
_DRAFTS = ("num_draft_tokens", "adaptive", _DRAFT_BYTES)  # options of SpeculationOptions
# Whole numbers.
_COUNTS = ("num_threads", "kv_blocks", "max_adapters", "max_adapter_rank", "max_host_adapters", "num_draft_tokens")
_NULLS = ("null", "~")


def engine_options(settings: Sequence[str], speculate: str | None = None) -> dict[str, object]:
    """The options by name. Values are YAML: null is None, sizes may have units.

    speculate  the drafter of `--speculate`, which the options of drafts belong to

    Raises UsageError for an unknown name or a value that is not allowed.
    """
    options: dict[str, object] = {}
    allowed = list(dict.fromkeys([*ServingOptions.model_fields, _PATH, *_COUNTS, *_DRAFTS]))
    for setting in settings:
        name, separator, text = setting.partition("=")
        if not separator or not text.strip():
            raise UsageError(f"--set {shown(setting)} is not KEY=VALUE, such as kv_host_bytes=4GiB")
        if name not in allowed:
            raise UsageError(f"--set: {unknown('option', name, allowed, 'options')}")
        options[name] = _value(name, text)
    drafts = {name: options.pop(name) for name in _DRAFTS if name in options}
    if speculate is not None:
        options["speculation"] = SpeculationOptions(speculate, **drafts)  # type: ignore[arg-type]  # it checks the types
    elif drafts:
        raise UsageError(
            f"--set {next(iter(drafts))}: there are no drafts without a drafter; add --speculate lookup|DRAFT"
        )
    return options


def _value(name: str, text: str) -> object:
    if name == _PATH:
        return None if text.strip() in _NULLS else text.strip()
    if name in _COUNTS and text.strip().isdecimal():
        return int(text)
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UsageError(f"--set {name}: {shown(text)} is not a YAML value") from error
    if name in _COUNTS:
        raise UsageError(f"--set {name}: {shown(text)} is not a whole number")
    if name in _DRAFTS:
        return _bytes(name, value) if name == _DRAFT_BYTES else value
    try:
        return getattr(ServingOptions.model_validate({name: value}), name)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        reason = first["ctx"]["error"] if first["type"] == "value_error" else f"{shown(value)}: {first['msg']}"
        raise UsageError(f"--set {name}: {reason}") from error


def _bytes(name: str, value: object) -> object:
    try:
        return parse_bytes(value) if isinstance(value, str) else value
    except ValueError as error:
        raise UsageError(f"--set {name}: {error}") from error
