"""Schemes of single weights: those that mixed-precision assigns, and the option `overrides` of quantize-weights.

mixed-precision writes a weight's scheme on the nodes that read it:

    node.metadata_props["ingot.scheme"]     {"bits": 3, "block_size": 128, "symmetric": false}, or {"bits": 16}

quantize-weights and gptq take it instead of their own bits, block_size and symmetric; their `overrides` come last.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TypedDict

import onnx_ir as ir

from ingot.errors import PassError, UsageError, one_of, shown, unknown
from ingot.options import convert_option
from ingot.passes.numerics.scheme import BlockSize, ScaleDtype, Scheme, WeightBits
from ingot.passes.weights import WeightSite, weight_sites

SCHEME_KEY = "ingot.scheme"


def assign_scheme(sites: Iterable[WeightSite], scheme: Scheme | None) -> bool:
    """Write the scheme on every reader of a weight, None for one that stays in 16 bits; return whether it changed."""
    chosen: dict[str, object] = {"bits": 16}
    if scheme is not None:
        chosen = {"bits": scheme.bits, "block_size": scheme.block_size, "symmetric": scheme.symmetric}
    text, is_changed = json.dumps(chosen), False
    for site in sites:
        is_changed |= site.node.metadata_props.get(SCHEME_KEY) != text
        site.node.metadata_props[SCHEME_KEY] = text
    return is_changed


def assigned_scheme(node: ir.Node, base: Scheme, otherwise: Scheme | None) -> Scheme | None:
    """The scheme assigned to a node, with clip and scale_dtype of `base`; `otherwise` when none was assigned."""
    if SCHEME_KEY not in node.metadata_props:
        return otherwise
    chosen = json.loads(node.metadata_props[SCHEME_KEY])
    return None if chosen["bits"] == 16 else replace(base, **chosen)


def require_used_schemes(model: ir.Model) -> None:
    """Raise PassError when weights were assigned bits and none was quantized afterwards."""
    waiting = [site for site in weight_sites(model) if _is_assigned_bits(site.node)]
    if waiting and not any(site.is_quantized for site in waiting):
        raise PassError(
            f"mixed-precision chose bits for {waiting[0].node.name!r} and {len(waiting) - 1} more, and nothing "
            "quantized them; put quantize-weights or gptq after it"
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
    scale_dtype: ScaleDtype


_FIELDS = {
    "bits": WeightBits,
    "block_size": BlockSize,
    "symmetric": bool,
    "clip": bool,
    "scale_dtype": ScaleDtype,
}
_LEAVE = ("none", 16)


def parse_overrides(owner: str, overrides: Mapping[str, object]) -> dict[str, Override | None]:
    """Parse pattern -> override, None where the weight stays unquantized.

    UsageError names the pattern, the key, its value and what is allowed.
    """
    return {pattern: _parse(f"{owner}: overrides[{shown(pattern)}]", value) for pattern, value in overrides.items()}


def _parse(owner: str, value: object) -> Override | None:
    if value in _LEAVE:
        return None
    if not isinstance(value, Mapping) or not value:
        raise UsageError(f'{owner} is {shown(value)}; allowed: "none", 16, or a mapping with {one_of(_FIELDS)}')
    override = Override()
    for key, item in value.items():
        if key not in _FIELDS:
            raise UsageError(f"{owner}: {unknown('key', key, _FIELDS, 'keys')}")
        _set(override, key, convert_option(owner, key, item, _FIELDS[key]))
    return override


def _set(override: Override, key: str, value: int | str) -> None:
    override.update({key: 0 if value == "channel" else value})  # type: ignore[misc]  # key is one of _FIELDS
