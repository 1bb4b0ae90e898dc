"""What mixed-precision decided for a weight, on the nodes that read it, for the quantizer that follows.

    node.metadata_props["ingot.scheme"]     {"bits": 3, "block_size": 128, "symmetric": false}, or {"bits": 16}

quantize-weights and gptq take it in the place of their own bits, block_size and symmetric; their `overrides` come last.

Per-weight overrides of quantize-weights, from plain data to checked keyword arguments of Scheme.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Literal, TypedDict

import onnx_ir as ir

from ingot.errors import PassError, UsageError, did_you_mean, one_of
from ingot.passes.base import convert_option
from ingot.passes.numerics.scale_search import Scheme, WeightBits
from ingot.passes.weights import WeightSite, weight_sites

SCHEME_KEY = "ingot.scheme"


def assign_scheme(sites: Iterable[WeightSite], scheme: Scheme | None) -> bool:
    """Write the scheme on every reader of a weight, None for one that stays in 16 bits; whether that was news."""
    chosen: dict[str, object] = {"bits": 16}
    if scheme is not None:
        chosen = {"bits": scheme.bits, "block_size": scheme.block_size, "symmetric": scheme.symmetric}
    text, is_news = json.dumps(chosen), False
    for site in sites:
        is_news |= site.node.metadata_props.get(SCHEME_KEY) != text
        site.node.metadata_props[SCHEME_KEY] = text
    return is_news


def assigned_scheme(node: ir.Node, base: Scheme, otherwise: Scheme | None) -> Scheme | None:
    """What the node was assigned, with the clip of `base`; `otherwise` when it was assigned nothing."""
    if SCHEME_KEY not in node.metadata_props:
        return otherwise
    chosen = json.loads(node.metadata_props[SCHEME_KEY])
    return None if chosen["bits"] == 16 else replace(base, **chosen)


def require_used_schemes(model: ir.Model) -> None:
    """PassError when weights were assigned bits and none was quantized since."""
    waiting = [site for site in weight_sites(model) if _is_assigned_bits(site.node)]
    if waiting and not any(site.is_quantized for site in waiting):
        raise PassError(
            f"mixed-precision chose bits for {waiting[0].node.name!r} and {len(waiting) - 1} more, and nothing "
            "quantized them; put quantize-weights or gptq behind it"
        )


def _is_assigned_bits(node: ir.Node) -> bool:
    text = node.metadata_props.get(SCHEME_KEY)
    return text is not None and json.loads(text)["bits"] != 16


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
