"""Per-weight overrides of quantize-weights, from plain data to checked keyword arguments of Scheme."""

from collections.abc import Mapping
from typing import Literal, TypedDict

from ingot.errors import UsageError, did_you_mean, one_of
from ingot.passes.options import convert_option
from ingot.passes.quantization.scale_search import WeightBits


class Override(TypedDict, total=False):
    """The fields of Scheme that an override sets."""

    bits: WeightBits
    block_size: int
    symmetric: bool
    clip: bool


_FIELDS = {
    "bits": WeightBits,
    "block_size": Literal[0, 16, 32, 64, 128, 256, "channel"],
    "symmetric": bool,
    "clip": bool,
}
_LEAVE = ("none", 16)


def parse_overrides(owner: str, overrides: Mapping[str, object]) -> dict[str, Override | None]:
    """pattern -> override, None where the weight stays as it is. UsageError names pattern, key and what is allowed."""
    return {pattern: _parse(f"{owner}: overrides[{pattern!r}]", value) for pattern, value in overrides.items()}


def _parse(owner: str, value: object) -> Override | None:
    if value in _LEAVE:
        return None
    if not isinstance(value, Mapping) or not value:
        raise UsageError(f'{owner} is {value!r}; allowed: "none", 16, or a mapping with {one_of(_FIELDS)}')
    override = Override()
    for key, item in value.items():
        if key not in _FIELDS:
            raise UsageError(f"{owner}: unknown key {key!r}; keys: {one_of(_FIELDS)}.{did_you_mean(key, _FIELDS)}")
        _set(override, key, convert_option(owner, key, item, _FIELDS[key]))
    return override


def _set(override: Override, key: str, value: int | str) -> None:
    override.update({key: 0 if value == "channel" else value})  # type: ignore[misc]  # key is one of _FIELDS
