"""`--set KEY=VALUE` of `ingot run`: options of `Engine.load`, instead of the artifact's defaults."""

from collections.abc import Sequence

import yaml
from pydantic import ValidationError

from ingot.artifact.serving import ServingOptions
from ingot.errors import UsageError, shown, unknown

_PATH = "kv_disk_path"  # a folder of this machine, so no artifact has a default
_COUNTS = ("num_threads", "max_adapters", "max_adapter_rank", "max_host_adapters")  # of this machine, and of adapters
_NULLS = ("null", "~")


def engine_options(settings: Sequence[str]) -> dict[str, object]:
    """The options by name. Values are YAML: null is None, sizes may have units.

    Raises UsageError for an unknown name or a value that is not allowed.
    """
    options: dict[str, object] = {}
    allowed = [*ServingOptions.model_fields, _PATH, *_COUNTS]
    for setting in settings:
        name, separator, text = setting.partition("=")
        if not separator or not text.strip():
            raise UsageError(f"--set {shown(setting)} is not KEY=VALUE, such as kv_host_bytes=4GiB")
        if name not in allowed:
            raise UsageError(f"--set: {unknown('option', name, allowed, 'options')}")
        options[name] = _value(name, text)
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
    try:
        return getattr(ServingOptions.model_validate({name: value}), name)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        reason = first["ctx"]["error"] if first["type"] == "value_error" else f"{shown(value)}: {first['msg']}"
        raise UsageError(f"--set {name}: {reason}") from error
