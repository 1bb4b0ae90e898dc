"""The kind of each layer of a hybrid: attention, recurrent, both, or a feed-forward or experts alone."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

from ingot.errors import one_of
from ingot.pipeline.checkpoint.json_files import ConfigReader
from ingot.pipeline.checkpoint.recurrent_config import RecurrentRules

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


def read_layer_kinds(reader: ConfigReader, rules: RecurrentRules) -> tuple[LayerKind, ...]:
    """Return the kind of each layer. ConfigError for a list of another length or with unknown kinds."""
    if rules.layers == "pattern":
        return _by_pattern(reader)
    count = reader.integer("num_hidden_layers")
    given = reader.raw("layer_types") if reader.raw("layer_types") is not None else reader.raw("layers_block_type")
    if given is not None and rules.layers not in ("indices", "both"):
        return _listed(reader, given, count)
    return tuple(_RULES[rules.layers](reader, layer, count) for layer in range(count))


def _listed(reader: ConfigReader, given: Any, count: int) -> tuple[LayerKind, ...]:
    key = "layer_types" if reader.raw("layer_types") is not None else "layers_block_type"
    if not isinstance(given, list) or len(given) != count or any(_KINDS.get(str(kind)) is None for kind in given):
        raise reader.fail(key, f"a list of {count} values, each {one_of(list(_KINDS))}")
    return tuple(_KINDS[kind] for kind in given)


def _by_pattern(reader: ConfigReader) -> tuple[LayerKind, ...]:
    pattern = reader.values.get("hybrid_override_pattern")
    if pattern is None:
        listed = reader.raw("layers_block_type") or reader.raw("layer_types")
        if not isinstance(listed, list):
            raise reader.fail("layers_block_type", "a list of the kinds of all layers")
        return _listed(reader, listed, len(listed))
    if not isinstance(pattern, str) or not pattern or any(letter not in _LETTERS for letter in pattern):
        raise reader.fail("hybrid_override_pattern", f"letters, one for each layer: {one_of(list(_LETTERS))}")
    return tuple(_LETTERS[letter] for letter in pattern)


def _missing(reader: ConfigReader, layer: int, count: int) -> LayerKind:
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


_RULES: Mapping[str, Callable[[ConfigReader, int, int], LayerKind]] = {
    "interval": _by_interval,
    "fourth": _fourth,
    "indices": _by_index,
    "not-full": _attention_by_index,
    "all": lambda reader, layer, count: "recurrent",
    "both": lambda reader, layer, count: "both",
    "missing": _missing,
}
