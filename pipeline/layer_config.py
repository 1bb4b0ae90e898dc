"""Which layers look through a sliding window, and which rotate: read from the keys that each family uses for it."""

from ingot.errors import ConfigError
from ingot.pipeline.config_reader import ConfigReader
from ingot.pipeline.families import Family
from ingot.pipeline.rope_config import LAYER_TYPES


def read_rotated(reader: ConfigReader, num_layers: int) -> tuple[bool, ...]:
    """Per layer, whether positions are encoded; all layers but for families with no_rope_layers (1: rotates)."""
    if not reader.reads("no_rope_layers"):
        return (True,) * num_layers
    flags = reader.raw("no_rope_layers")
    if flags is None:
        interval = reader.integer("no_rope_layer_interval")
        return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    if not isinstance(flags, list) or len(flags) < num_layers or any(flag not in (0, 1) for flag in flags):
        raise reader.fail("no_rope_layers", f"a list of at least {num_layers} times 0 or 1, or null")
    return tuple(bool(flag) for flag in flags[:num_layers])


def read_windows(reader: ConfigReader, family: Family, rotated: tuple[bool, ...]) -> tuple[int | None, ...]:
    """Per layer, tokens that a token sees, itself included; None for a full-attention layer.

    Raises ConfigError when layer_types, sliding_window and use_sliding_window contradict each other or the family.
    """
    window = reader.optional_integer("sliding_window")
    if reader.reads("use_sliding_window") and not reader.boolean("use_sliding_window"):
        window = None
    given = _given_layer_types(reader, len(rotated))
    if family.windows in ("none", "all"):
        sliding = [family.windows == "all" and window is not None] * len(rotated)
        _refuse_ignored(reader, family, window, sliding, given)
    else:
        sliding = given or _sliding_by_rule(reader, family, window, rotated)
    if any(sliding) and window is None:
        raise ConfigError(
            f"{reader.place}: some layers are sliding_attention, but sliding_window is {reader.raw('sliding_window')!r}"
            f"{_switch(reader)}; give the window, or make all layer_types full_attention"
        )
    return tuple(window if slides else None for slides in sliding)


def _switch(reader: ConfigReader) -> str:
    if not reader.reads("use_sliding_window"):
        return ""
    return f" and use_sliding_window is {reader.raw('use_sliding_window')!r}"


def _given_layer_types(reader: ConfigReader, num_layers: int) -> list[bool] | None:
    types = reader.raw("layer_types")
    if types is None:
        return None
    if not isinstance(types, list) or len(types) != num_layers or any(kind not in LAYER_TYPES for kind in types):
        raise reader.fail(
            "layer_types", f"a list of {num_layers} times 'full_attention' or 'sliding_attention', or null"
        )
    return [kind == "sliding_attention" for kind in types]


def _refuse_ignored(
    reader: ConfigReader, family: Family, window: int | None, sliding: list[bool], given: list[bool] | None
) -> None:
    """These families do not read layer_types, and some no sliding_window: a value that would be ignored is refused."""
    if family.windows == "none" and window is not None:
        raise reader.fail("sliding_window", "absent or null: this model_type has no window")
    if given is not None and given != sliding:
        raise reader.fail("layer_types", "absent: this model_type gives all layers the same window, by sliding_window")


def _sliding_by_rule(reader: ConfigReader, family: Family, window: int | None, rotated: tuple[bool, ...]) -> list[bool]:
    layers = range(len(rotated))
    match family.windows:
        case "alternating":
            return [layer % 2 == 0 for layer in layers]
        case "pattern":
            pattern = reader.integer("sliding_window_pattern")
            return [(layer + 1) % pattern != 0 for layer in layers]
        case "from-max-window-layers":
            first = reader.integer("max_window_layers", minimum=0)
            return [window is not None and layer >= first for layer in layers]
        case _:
            return [window is not None and not rotates for rotates in rotated]
