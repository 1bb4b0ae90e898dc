"""The facts of each layer: its window, its rope, its sizes, its experts and its recurrent part.

A layer of a hybrid has attention, a recurrent part, both, or a feed-forward or experts alone.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Literal

from ingot.errors import ConfigError, one_of, shown
from ingot.pipeline.checkpoint.config.experts import ExpertsConfig, read_experts
from ingot.pipeline.checkpoint.config.latent import LatentConfig
from ingot.pipeline.checkpoint.config.recurrent import RecurrentConfig, RecurrentRules, read_recurrent
from ingot.pipeline.checkpoint.config.rope import LAYER_TYPES, read_rope
from ingot.pipeline.checkpoint.config.unequal_layers import LayerShape, read_shapes
from ingot.pipeline.checkpoint.families import Family
from ingot.pipeline.checkpoint.json_files import ConfigReader
from ingot.pipeline.model.rope import RopeParameters

LayerKind = Literal["attention", "recurrent", "both", "feed-forward", "experts"]
_KINDS: Mapping[str, LayerKind] = {
    "full_attention": "attention",
    "attention": "attention",
    "linear_attention": "recurrent",
    "mamba": "recurrent",
    "conv": "recurrent",
    "mlp": "feed-forward",
    "moe": "experts",
}
_LETTERS: Mapping[str, LayerKind] = {"*": "attention", "M": "recurrent", "-": "feed-forward", "E": "experts"}


@dataclass(frozen=True)
class LayerConfig:
    """The facts that differ from layer to layer.

    window    tokens that a token attends to, itself included; 0: all previous tokens
    rope      None if the layer does not encode positions
    shape     sizes of its heads and of its feed-forward
    experts   None if the feed-forward is dense
    attends   whether it has attention; recurrent: what its recurrent layer computes, None without one
    feeds     whether it has a feed-forward
    """

    window: int
    rope: RopeParameters | None
    shape: LayerShape
    experts: ExpertsConfig | None = None
    attends: bool = True
    recurrent: RecurrentConfig | None = None
    feeds: bool = True


def read_layers(
    reader: ConfigReader,
    family: Family,
    uniform: LayerShape,
    latent: LatentConfig | None,
    tensors: Mapping[str, tuple[int, ...]],
) -> tuple[LayerConfig, ...]:
    if family.recurrent is not None:
        return _hybrid_layers(reader, family, uniform, tensors)
    rotated = read_rotated(reader, reader.integer("num_hidden_layers"))
    windows = read_windows(reader, family, rotated)
    experts = read_experts(reader, family.experts, len(rotated))
    shapes = read_shapes(reader, family, uniform, windows)
    if family.rotated == "none":
        return tuple(LayerConfig(window or 0, None, shape) for window, shape in zip(windows, shapes, strict=True))
    kinds = ["full_attention" if window is None else "sliding_attention" for window in windows]
    dims = _dims_by_kind(reader, kinds, shapes)
    if latent is not None:
        ropes = _rope_of_latent(reader, family, latent)
    else:
        ropes = read_rope(reader, family, dict.fromkeys(LAYER_TYPES, uniform.head_dim) | dims)
    if family.rotated == "sliding" or (family.rotated == "sliding-or-all" and reader.raw("sliding_window") is not None):
        rotated = tuple(window is not None for window in windows)
    by_layer = [ropes[kind] if rotates else None for kind, rotates in zip(kinds, rotated, strict=True)]
    if family.rotated == "thetas" and reader.raw("layer_rope_theta") is not None:
        by_layer = _by_theta(reader, ropes["full_attention"], len(windows))
    return tuple(
        LayerConfig(window or 0, rope, shape, mixture)
        for window, rope, shape, mixture in zip(windows, by_layer, shapes, experts, strict=True)
    )


def _dims_by_kind(reader: ConfigReader, kinds: list[str], shapes: tuple[LayerShape, ...]) -> dict[str, int]:
    """Return head_dim of the layers of each kind, which share a rope; ConfigError where it is not one."""
    dims: dict[str, int] = {}
    for kind, shape in zip(kinds, shapes, strict=True):
        if dims.setdefault(kind, shape.head_dim) != shape.head_dim:
            raise ConfigError(
                f"{reader.place}: layers of the kind {kind} have a head_dim of {dims[kind]} and of {shape.head_dim}, "
                "but all of a kind share one rope; layer_types contradicts the sizes of heads"
            )
    return dims


def _hybrid_layers(
    reader: ConfigReader, family: Family, shape: LayerShape, tensors: Mapping[str, tuple[int, ...]]
) -> tuple[LayerConfig, ...]:
    """Layers of a family that has recurrent ones; none of them has a window."""
    rules = family.recurrent
    assert rules is not None
    kinds, recurrent = _layer_kinds(reader, rules), read_recurrent(reader, rules, tensors)
    experts = read_experts(reader, family.experts, len(kinds))
    if not {"attention", "both"} & set(kinds):
        raise ConfigError(f"{reader.place}: no layer has attention; models of recurrent layers alone are not supported")
    if rules.layers == "pattern":
        experts = tuple(mixture if kind == "experts" else None for mixture, kind in zip(experts, kinds, strict=True))
    dims = dict.fromkeys(LAYER_TYPES, shape.head_dim)
    rope = read_rope(reader, family, dims)["full_attention"] if _rotates(reader, family) else None
    return tuple(
        LayerConfig(
            window=0,
            rope=rope if kind in ("attention", "both") else None,
            shape=shape,
            experts=mixture,
            attends=kind in ("attention", "both"),
            recurrent=recurrent if kind in ("recurrent", "both") else None,
            feeds=rules.layers != "pattern" or kind in ("feed-forward", "experts"),
        )
        for kind, mixture in zip(kinds, experts, strict=True)
    )


def _rotates(reader: ConfigReader, family: Family) -> bool:
    """Whether attention layers of a hybrid encode positions."""
    match family.rotated:
        case "typed":
            return bool(reader.raw("position_embedding_type") == "rope")
        case "given":
            return reader.raw("rope_theta") is not None or "rope_theta" in (reader.raw("rope_parameters") or {})
        case _:
            return family.rotated != "none"


def _rope_of_latent(reader: ConfigReader, family: Family, latent: LatentConfig) -> dict[str, RopeParameters]:
    """The rope of queries and keys: it rotates qk_rope_head_dim dims, whatever the spelling of their share."""
    dim = latent.rope_dim
    if family.latent is not None and family.latent.of_whole_head:
        dim, fraction = latent.query_dim, latent.rope_dim / latent.query_dim
        family = replace(family, partial_rotary=True, rotary_fraction=fraction)
    ropes = read_rope(reader, family, dict.fromkeys(LAYER_TYPES, dim))
    found = ropes["full_attention"].rotary_dim
    if found != latent.rope_dim:
        raise ConfigError(
            f"{reader.place}: partial_rotary_factor rotates {found} dimensions of a head, but qk_rope_head_dim is "
            f"{latent.rope_dim}; remove one"
        )
    return ropes


def _by_theta(reader: ConfigReader, rope: RopeParameters, num_layers: int) -> list[RopeParameters | None]:
    """The rope of each layer, with the theta of its own in layer_rope_theta; 0: none."""
    thetas = reader.raw("layer_rope_theta")
    is_right = isinstance(thetas, list) and len(thetas) == num_layers
    if not is_right or any(isinstance(theta, bool) or not _is_theta(theta) for theta in thetas):
        raise reader.fail("layer_rope_theta", f"a list of {num_layers} numbers, each 0 or above 1, or null")
    return [replace(rope, theta=float(theta)) if theta else None for theta in thetas]


def _is_theta(value: Any) -> bool:
    return isinstance(value, int | float) and (value == 0 or 1 < value < inf)


def read_rotated(reader: ConfigReader, num_layers: int) -> tuple[bool, ...]:
    """Return for each layer whether it has rope: all do, except in families with no_rope_layers (1: rope, 0: none)."""
    if not reader.reads("no_rope_layers"):
        return (True,) * num_layers
    flags = reader.raw("no_rope_layers")
    if flags is None:
        interval = reader.integer("no_rope_layer_interval")
        return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    if not isinstance(flags, list) or len(flags) < num_layers or any(flag not in (0, 1) for flag in flags):
        raise reader.fail("no_rope_layers", f"a list of at least {num_layers} values, each 0 or 1, or null")
    return tuple(bool(flag) for flag in flags[:num_layers])


def read_windows(reader: ConfigReader, family: Family, rotated: tuple[bool, ...]) -> tuple[int | None, ...]:
    """The window of each layer, tokens that a token attends to with itself included; None for full attention.

    Raises ConfigError when layer_types, sliding_window and use_sliding_window contradict each other or the family.
    """
    is_off = reader.reads("use_sliding_window") and not reader.boolean("use_sliding_window")
    window = None if is_off else reader.optional_integer("sliding_window")
    given = _given_layer_types(reader, len(rotated))
    if family.windows in ("none", "all"):
        sliding = [family.windows == "all" and window is not None] * len(rotated)
        _refuse_ignored(reader, family, window, sliding, given)
    else:
        sliding = given or _sliding_by_rule(reader, family, window, rotated)
    if family.last_is_full:
        sliding = [*sliding[:-1], False]
    if any(sliding) and window is None:
        raise ConfigError(
            f"{reader.place}: some layers are sliding_attention, but sliding_window is "
            f"{shown(reader.raw('sliding_window'))}{_switch(reader)}; set the window, or make all layer_types "
            "full_attention"
        )
    return tuple(window if slides else None for slides in sliding)


def _switch(reader: ConfigReader) -> str:
    if not reader.reads("use_sliding_window"):
        return ""
    return f" and use_sliding_window is {shown(reader.raw('use_sliding_window'))}"


def _given_layer_types(reader: ConfigReader, num_layers: int) -> list[bool] | None:
    types = reader.raw("layer_types")
    if types is None:
        return None
    if not isinstance(types, list) or len(types) != num_layers or any(kind not in LAYER_TYPES for kind in types):
        raise reader.fail(
            "layer_types", f"a list of {num_layers} values, each 'full_attention' or 'sliding_attention', or null"
        )
    return [kind == "sliding_attention" for kind in types]


def _refuse_ignored(
    reader: ConfigReader, family: Family, window: int | None, sliding: list[bool], given: list[bool] | None
) -> None:
    """Refuse a value that would be ignored: these families do not read layer_types, and some no sliding_window."""
    if family.windows == "none" and window is not None:
        raise reader.fail("sliding_window", "absent or null: this model_type has no window")
    if given is not None and given != sliding:
        raise reader.fail("layer_types", "absent: this model_type gives all layers the same window, by sliding_window")


def _sliding_by_rule(reader: ConfigReader, family: Family, window: int | None, rotated: tuple[bool, ...]) -> list[bool]:
    layers = range(len(rotated))
    match family.windows:
        case "listed-or-all" | "listed-or-none":
            return [family.windows == "listed-or-all" and window is not None] * len(rotated)
        case "local":
            return [kind == "local" for kind in _attention_types(reader, len(rotated))]
        case "alternating":
            return [layer % 2 == 0 for layer in layers]
        case "pattern":
            return _by_pattern(reader, family, len(rotated))
        case "pattern-or-none":
            return [False] * len(rotated) if window is None else _by_pattern(reader, family, len(rotated))
        case "even-before-max-window-layers":
            last = reader.integer("max_window_layers", minimum=0)
            return [window is not None and layer < last and layer % 2 == 0 for layer in layers]
        case "from-max-window-layers":
            first = reader.integer("max_window_layers", minimum=0)
            return [window is not None and layer >= first for layer in layers]
        case _:
            return [window is not None and not rotates for rotates in rotated]


def _attention_types(reader: ConfigReader, num_layers: int) -> list[str]:
    """Return the kind of each layer (GPT-Neo): attention_layers, or attention_types, [[kinds, times], ...]."""
    listed = reader.values.get("attention_layers")
    if listed is not None:
        if not _is_run([listed, 1], num_layers) or len(listed) != num_layers:
            raise reader.fail("attention_layers", f'"global" or "local" for each of {num_layers} layers, or absent')
        return list(listed)
    match reader.raw("attention_types"):
        case [*runs] if all(_is_run(run, num_layers) for run in runs):
            kinds = [kind for names, times in runs for kind in names * times]
            if len(kinds) == num_layers:
                return kinds
    allowed = f"a list of [kinds, times] for {num_layers} layers, each kind 'global' or 'local'"
    raise reader.fail("attention_types", allowed)


def _is_run(run: Any, num_layers: int) -> bool:
    match run:
        case [[*kinds], int(times)]:
            return 0 < times <= num_layers and len(kinds) <= num_layers and {*map(str, kinds)} <= {"global", "local"}
    return False


def _by_pattern(reader: ConfigReader, family: Family, num_layers: int) -> list[bool]:
    """Return for each layer whether it slides: all but one of every so many, the last of them or the first."""
    every = family.full_every or reader.integer("sliding_window_pattern")
    return [layer % every != (0 if family.full_first else every - 1) for layer in range(num_layers)]


def _layer_kinds(reader: ConfigReader, rules: RecurrentRules) -> tuple[LayerKind, ...]:
    """Return the kind of each layer. ConfigError for a list of another length or with unknown kinds."""
    if rules.layers == "pattern":
        return _kinds_by_pattern(reader)
    count = reader.integer("num_hidden_layers")
    given = reader.raw("layer_types") if reader.raw("layer_types") is not None else reader.raw("layers_block_type")
    if given is not None and rules.layers not in ("indices", "both"):
        return _listed_kinds(reader, given, count)
    return tuple(_KIND_RULES[rules.layers](reader, layer, count) for layer in range(count))


def _listed_kinds(reader: ConfigReader, given: Any, count: int) -> tuple[LayerKind, ...]:
    key = "layer_types" if reader.raw("layer_types") is not None else "layers_block_type"
    if not isinstance(given, list) or len(given) != count or any(_KINDS.get(str(kind)) is None for kind in given):
        raise reader.fail(key, f"a list of {count} values, each {one_of(list(_KINDS))}")
    return tuple(_KINDS[kind] for kind in given)


def _kinds_by_pattern(reader: ConfigReader) -> tuple[LayerKind, ...]:
    pattern = reader.values.get("hybrid_override_pattern")
    if pattern is None:
        listed = reader.raw("layers_block_type") or reader.raw("layer_types")
        if not isinstance(listed, list):
            raise reader.fail("layers_block_type", "a list of the kinds of all layers")
        return _listed_kinds(reader, listed, len(listed))
    if not isinstance(pattern, str) or not pattern or any(letter not in _LETTERS for letter in pattern):
        raise reader.fail("hybrid_override_pattern", f"letters, one for each layer: {one_of(list(_LETTERS))}")
    return tuple(_LETTERS[letter] for letter in pattern)


def _missing_kind(reader: ConfigReader, layer: int, count: int) -> LayerKind:
    raise reader.fail("layer_types", f"a list of {count} values, each {one_of(list(_KINDS))}")


def _by_interval(reader: ConfigReader, layer: int, count: int) -> LayerKind:
    interval = reader.values.get("full_attention_interval", 4)
    if type(interval) is not int or interval < 1:
        raise reader.fail("full_attention_interval", "a whole number from 1 up")
    return "recurrent" if (layer + 1) % interval else "attention"


def _fourth(reader: ConfigReader, layer: int, count: int) -> LayerKind:
    is_last_of_few = count < 4 and layer == count - 1
    return "attention" if layer % 4 == 3 or is_last_of_few else "recurrent"


def _by_index(reader: ConfigReader, layer: int, count: int) -> LayerKind:
    return "attention" if layer in (reader.integers("attn_layer_indices") or ()) else "recurrent"


def _attention_by_index(reader: ConfigReader, layer: int, count: int) -> LayerKind:
    indices = reader.integers("full_attn_idxs")
    return "attention" if indices is None or layer in indices else "recurrent"


_KIND_RULES: Mapping[str, Callable[[ConfigReader, int, int], LayerKind]] = {
    "interval": _by_interval,
    "fourth": _fourth,
    "indices": _by_index,
    "not-full": _attention_by_index,
    "all": lambda reader, layer, count: "recurrent",
    "both": lambda reader, layer, count: "both",
    "missing": _missing_kind,
}
