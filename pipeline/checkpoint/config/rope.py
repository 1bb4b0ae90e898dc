"""Reads rope parameters from config.json, in their old and new spellings.

old    rope_theta, rope_scaling {type or rope_type, factor, ...}, partial_rotary_factor, rope_local_base_freq
new    rope_parameters {rope_type, rope_theta, factor, ...}
new    rope_parameters {full_attention: {...}, sliding_attention: {...}} where they differ between layer types
"""

from collections.abc import Mapping
from typing import Any

from ingot.errors import ConfigError, near_or_all, one_of, shown, unknown
from ingot.pipeline.checkpoint.families import Family
from ingot.pipeline.checkpoint.json_files import ConfigReader
from ingot.pipeline.model.rope import ROPE_KINDS, RopeParameters

LAYER_TYPES = ("full_attention", "sliding_attention")
_DEFAULTS: dict[str, Any] = {
    "factor": None,
    "original_max_position_embeddings": None,
    "attention_factor": None,
    "low_freq_factor": None,
    "high_freq_factor": None,
    "beta_fast": None,
    "beta_slow": None,
    "mscale": None,
    "mscale_all_dim": None,
    "truncate": True,
    "short_factor": None,
    "long_factor": None,
    "alpha": None,
    "llama_4_scaling_beta": None,
    "short_mscale": None,
    "long_mscale": None,
}
_KNOWN = {*_DEFAULTS, "rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned"}

_PART = "partial_rotary_factor"
_MROPE = {"mrope_section", "mrope_interleaved"}  # keys that give each frequency its axis


def read_rope(reader: ConfigReader, family: Family, head_dims: Mapping[str, int]) -> dict[str, RopeParameters]:
    """Read the parameters of each layer type, "full_attention" and "sliding_attention"; most families have one set.

    head_dims   head_dim of each layer type
    Raises ConfigError for an unknown or unsupported kind, an unknown key, a wrong value, or contradicting spellings.
    """
    if family.rope_by_layer_type:
        return {
            kind: _parameters(reader, family, raw, head_dims[kind], f"rope parameters of {kind}")
            for kind, raw in _by_layer_type(reader, family).items()
        }
    (head_dim,) = set(head_dims.values())
    parameters = _parameters(reader, family, _flat(reader, family, head_dim), head_dim, "rope parameters")
    return dict.fromkeys(LAYER_TYPES, parameters)


def _flat(reader: ConfigReader, family: Family, head_dim: int) -> dict[str, Any]:
    old, new = reader.optional_object("rope_scaling"), reader.optional_object("rope_parameters")
    if old and new and _contradict(old, new):
        raise ConfigError(
            f"{reader.place}: rope_scaling is {shown(old, 200)} but rope_parameters is {shown(new, 200)}; remove the "
            "wrong one"
        )
    merged = {**(new or {}), **(old or {})}
    nested = [key for key in merged if isinstance(merged[key], dict)]
    if nested:
        raise ConfigError(
            f"{reader.place}: rope_parameters holds {shown(nested)}; a {reader.raw('model_type')} model has "
            "one set of parameters for all layers, so it must hold rope_type and rope_theta directly"
        )
    if not merged:
        merged = dict(family.default_rope)
    for key in ("rope_theta", "partial_rotary_factor"):
        _merge(reader, merged, key)
    if reader.reads("rotary_dim") and reader.raw("rotary_dim") is not None:
        merged.setdefault("partial_rotary_factor", reader.integer("rotary_dim") / head_dim)
    merged.setdefault("rope_theta", family.default_theta)
    return merged


def _contradict(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether two spellings name different kinds, or different values under the same key."""
    kinds = [spelling.get("rope_type", spelling.get("type", "default")) for spelling in (old, new)]
    return kinds[0] != kinds[1] or any(new[key] != value for key, value in old.items() if key in new)


def _merge(reader: ConfigReader, merged: dict[str, Any], key: str) -> None:
    """Copy a top-level key into the rope parameters; refuse a value that differs from theirs."""
    outer = reader.raw(key)
    if outer is not None and merged.setdefault(key, outer) != outer:
        raise ConfigError(
            f"{reader.place}: {reader.names.get(key, key)} is {shown(outer)}, but the rope parameters have "
            f"{shown(merged[key])}; remove one"
        )


def _by_layer_type(reader: ConfigReader, family: Family) -> dict[str, dict[str, Any]]:
    new = reader.optional_object("rope_parameters") or family.default_rope
    unknown = [key for key in new if key not in LAYER_TYPES]
    if unknown:
        raise ConfigError(
            f"{reader.place}: rope_parameters holds {shown(unknown)}; a {reader.raw('model_type')} model has "
            f"one set of parameters per layer type: {one_of(LAYER_TYPES)}"
        )
    scaling = reader.optional_object("rope_scaling") or {}
    if "type" in scaling and "rope_type" not in scaling:
        raise ConfigError(
            f"{reader.place}: rope_scaling has type {shown(scaling['type'])} but no rope_type; transformers would not "
            "scale the rope of this family. Rename type to rope_type"
        )
    for kind in LAYER_TYPES:
        if not isinstance(new.get(kind), dict | None):
            raise ConfigError(
                f"{reader.place}: rope_parameters.{kind} is {shown(new[kind])}; it must be an object or null"
            )
    full, sliding = ({**(new.get(kind) or {})} for kind in LAYER_TYPES)
    full.update(scaling)
    full.setdefault("rope_theta", reader.values.get("rope_theta", family.default_theta))
    sliding.setdefault("rope_theta", reader.values.get(family.local_theta_key, family.local_theta))
    for parameters in (full, sliding):
        _merge(reader, parameters, "partial_rotary_factor")
    return {"full_attention": full, "sliding_attention": sliding}


def _parameters(
    reader: ConfigReader, family: Family, raw: Mapping[str, Any], head_dim: int, what: str
) -> RopeParameters:
    given = [key for key in ("rope_scaling", "rope_parameters") if reader.values.get(key)]
    place = f"{what} ({' and '.join(given)})" if given else what
    rope = ConfigReader(f"{reader.place}: {place}", raw, _DEFAULTS)
    _refuse_of_others(rope, family)
    ignored = ({"max_position_embeddings"} if family.query_scale else set()) | (_MROPE if family.mrope else set())
    known = _KNOWN | ignored
    for key in raw:
        if key not in known:
            raise ConfigError(f"{rope.place}: {unknown('key', key, known, 'known keys')}")
    kind = _kind(rope, family)
    rotary_dim = _rotary_dim(rope, family, head_dim, kind)
    if rope.number("rope_theta") <= 1:
        raise rope.fail("rope_theta", "a number above 1")
    common: dict[str, Any] = {
        "kind": kind,
        "theta": _theta(rope, rotary_dim),
        "query_scale": rope.number("llama_4_scaling_beta", positive=False) if family.query_scale else 0.0,
        "rotary_dim": rotary_dim,
        "max_positions": reader.integer("max_position_embeddings"),
        "original_max_positions": _original_positions(reader, rope),
        "mscale_all_dim": rope.optional_number("mscale_all_dim") if rope.raw("mscale_all_dim") else None,
    }
    if family.longrope_mscales:
        return RopeParameters(**common, **_mscaled(rope, kind, rotary_dim))
    return RopeParameters(**common, **_scaling(rope, kind, rotary_dim))


def _kind(rope: ConfigReader, family: Family) -> str:
    key = "rope_type" if "rope_type" in rope.values else "type"
    kind = rope.values.get(key, "default")
    if kind == "mrope" and family.mrope:
        return "default"
    if kind in family.longrope_aliases:
        return "longrope"
    if kind == "dynamic" and family.ntk_alpha and rope.raw("alpha"):
        return "default"
    if kind == "dynamic":
        raise ConfigError(
            f"{rope.place}: {key} is 'dynamic', which changes all keys of a sequence as it grows, so that they "
            f"cannot be cached; supported: {one_of(ROPE_KINDS)}"
        )
    if kind not in ROPE_KINDS:
        raise ConfigError(f"{rope.place}: {key} is {shown(kind)}{near_or_all(kind, ROPE_KINDS, 'supported')}")
    return str(kind)


def _refuse_of_others(rope: ConfigReader, family: Family) -> None:
    """Refuse keys that only other families read."""
    own = {"alpha": family.ntk_alpha, "llama_4_scaling_beta": family.query_scale}
    own |= dict.fromkeys(("short_mscale", "long_mscale"), family.longrope_mscales)
    for key, is_read in own.items():
        if not is_read and rope.raw(key) is not None:
            raise rope.fail(key, "absent: this model_type does not read it")


def _theta(rope: ConfigReader, rotary_dim: int) -> float:
    """rope_theta, grown by a fixed alpha where the type is dynamic and there is one."""
    theta = rope.number("rope_theta")
    kind = rope.values.get("rope_type", rope.values.get("type"))
    return theta * rope.number("alpha") ** (rotary_dim / (rotary_dim - 2)) if kind == "dynamic" else theta


def _rotary_dim(rope: ConfigReader, family: Family, head_dim: int, kind: str) -> int:
    fraction = (
        family.rotary_fraction if rope.raw("partial_rotary_factor") is None else rope.number("partial_rotary_factor")
    )
    if fraction > 1 or (fraction != 1 and not family.partial_rotary):
        raise rope.fail("partial_rotary_factor", "at most 1" if fraction > 1 else "1 or absent for this model_type")
    if kind == "proportional":  # the whole head is rotated, its slower frequencies are 0
        return head_dim
    rotary_dim = int(head_dim * fraction)
    if rotary_dim < 2 or rotary_dim % 2:
        raise ConfigError(
            f"{rope.place}: head_dim {head_dim} times partial_rotary_factor {fraction} rotates {rotary_dim} "
            "dimensions; the number must be even and at least 2"
        )
    return rotary_dim


def _original_positions(reader: ConfigReader, rope: ConfigReader) -> int:
    """The original context length; the top-level key overrides the rope parameters, as in transformers."""
    for place in (reader, rope):
        if place.raw("original_max_position_embeddings") is not None:
            return place.integer("original_max_position_embeddings", minimum=2)
    return reader.integer("max_position_embeddings")


def _mscaled(rope: ConfigReader, kind: str, rotary_dim: int) -> dict[str, Any]:
    """Longrope with factors of cos and sin that are given, for short contexts and for long ones."""
    if kind == "default":
        return {}
    if kind != "longrope":
        raise rope.fail("rope_type" if "rope_type" in rope.values else "type", "'default' or 'longrope'")
    factors = {"attention_factor": rope.number("short_mscale"), "long_attention_factor": rope.number("long_mscale")}
    return {**_scaling(rope, kind, rotary_dim), **factors}


def _scaling(rope: ConfigReader, kind: str, rotary_dim: int) -> dict[str, Any]:
    match kind:
        case "linear":
            return {"factor": rope.number("factor")}
        case "proportional":
            return {"factor": rope.optional_number("factor") or 1.0, "rotated": rope.optional_number(_PART) or 1.0}
        case "llama3":
            numbers = {key: rope.number(key) for key in ("factor", "low_freq_factor", "high_freq_factor")}
            if numbers["high_freq_factor"] <= numbers["low_freq_factor"]:
                raise rope.fail("high_freq_factor", f"above low_freq_factor, {numbers['low_freq_factor']}")
            return numbers
        case "yarn":
            optional = ("factor", "attention_factor", "mscale")
            betas = {key: rope.optional_number(key) for key in ("beta_fast", "beta_slow")}
            given = {key: value for key, value in betas.items() if value is not None}
            return {key: rope.optional_number(key) for key in optional} | given | {"truncate": rope.boolean("truncate")}
        case "longrope":
            return {
                "short_factors": rope.numbers("short_factor", rotary_dim // 2),
                "long_factors": rope.numbers("long_factor", rotary_dim // 2),
                "factor": rope.optional_number("factor"),
                "attention_factor": rope.optional_number("attention_factor"),
            }
        case _:
            return {}
