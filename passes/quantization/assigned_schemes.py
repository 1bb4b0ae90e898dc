"""What mixed-precision decided for a weight, on the nodes that read it, for the quantizer that follows.

    node.metadata_props["ingot.scheme"]     {"bits": 3, "block_size": 128, "symmetric": false}, or {"bits": 16}

quantize-weights and gptq take it in the place of their own bits, block_size and symmetric; their `overrides` come last.
"""

import json
from collections.abc import Iterable
from dataclasses import replace

import onnx_ir as ir

from ingot.errors import PassError
from ingot.passes.quantization.scale_search import Scheme
from ingot.passes.weight_sites import WeightSite, weight_sites

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
