"""Differences between layers beyond windows and rope, in Gemma 3n and Gemma 4, read from config.json.

head sizes      full layers have other heads than sliding ones; their keys may be their values
shared KV       the last layers read the keys and values of the last layer of their kind that has its own
feed-forwards   of a size of their own, or twice as wide where keys and values are shared; sparse ones
inputs          each layer has inputs of its own, made from the tokens and from their embeddings
AltUp           several residual streams, one of which a layer reads (arXiv 2301.13310)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ingot.errors import ConfigError, shown
from ingot.pipeline.checkpoint.families import Family
from ingot.pipeline.checkpoint.json_files import ConfigReader

MAX_STREAMS = 16


@dataclass(frozen=True)
class LayerShape:
    """The sizes of one layer.

    shares           the layer whose keys and values it reads; None if it has its own
    values_are_keys  values are made from the projection of keys
    sparsity         share of the gate's neurons that are set to zero, by their mean and deviation; 0: none
    """

    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    shares: int | None = None
    values_are_keys: bool = False
    sparsity: float = 0.0


@dataclass(frozen=True)
class LayerInputs:
    """Inputs of each layer: a table [vocab_size, layers * width] and a projection of the embedding."""

    vocab_size: int
    width: int


@dataclass(frozen=True)
class AltUp:
    """Residual streams: their number, the one that layers read, whether its correction is scaled; LAuReL's rank."""

    streams: int
    active: int
    scales_correction: bool
    laurel_rank: int


def read_shapes(
    reader: ConfigReader, family: Family, uniform: LayerShape, windows: Sequence[int | None]
) -> tuple[LayerShape, ...]:
    """The shape of each layer; `uniform` has the sizes of all layers, which the family's own keys change.

    ConfigError for lists of another length than the layers, and for sizes that contradict each other.
    """
    layers = range(len(windows))
    shares = _shares(reader, family, windows)
    heads = _heads(reader, family, uniform, windows)
    sizes = _intermediate_sizes(reader, uniform, shares)
    sparsity = _sparsity(reader, family, len(windows))
    is_one = family.global_heads and reader.boolean("attention_k_eq_v")
    return tuple(LayerShape(*heads[i], sizes[i], shares[i], is_one and windows[i] is None, sparsity[i]) for i in layers)


def read_layer_inputs(reader: ConfigReader, family: Family) -> LayerInputs | None:
    """The inputs of each layer; None if layers have none."""
    if not family.layer_inputs or not reader.integer("hidden_size_per_layer_input", minimum=0):
        return None
    return LayerInputs(reader.integer("vocab_size_per_layer_input"), reader.integer("hidden_size_per_layer_input"))


def read_altup(reader: ConfigReader, family: Family) -> AltUp | None:
    """The residual streams; None if there is one."""
    if not family.altup:
        return None
    streams, active = reader.integer("altup_num_inputs"), reader.integer("altup_active_idx", minimum=0)
    if not 2 <= streams <= MAX_STREAMS:
        raise reader.fail("altup_num_inputs", f"from 2 to {MAX_STREAMS}")
    if active >= streams:
        raise reader.fail("altup_active_idx", f"below altup_num_inputs, {streams}")
    return AltUp(streams, active, reader.boolean("altup_correct_scale"), reader.integer("laurel_rank"))


def _shares(reader: ConfigReader, family: Family, windows: Sequence[int | None]) -> list[int | None]:
    """The layer whose keys and values each layer reads: the last of its kind before the sharing ones."""
    count = len(windows)
    sharing = reader.integer("num_kv_shared_layers", minimum=0) if family.shares_kv else 0
    if sharing >= count and sharing:
        raise reader.fail("num_kv_shared_layers", f"below num_hidden_layers, {count}")
    first, found = count - sharing, list[int | None]()
    for layer, window in enumerate(windows):
        sources = [number for number in range(first) if (windows[number] is None) == (window is None)]
        if layer >= first and not sources:
            kind = "full_attention" if window is None else "sliding_attention"
            raise ConfigError(
                f"{reader.place}: num_kv_shared_layers is {sharing}, but no layer before them is {kind}, as layer "
                f"{layer} is; its keys and values would be those of no layer"
            )
        found.append(sources[-1] if layer >= first else None)
    return found


def _heads(
    reader: ConfigReader, family: Family, uniform: LayerShape, windows: Sequence[int | None]
) -> list[tuple[int, int]]:
    """num_kv_heads and head_dim of each layer: those of full layers have keys of their own."""
    same = (uniform.num_kv_heads, uniform.head_dim)
    if not family.global_heads:
        return [same] * len(windows)
    given = reader.optional_object("per_layer_config")
    if given is not None:
        return [_heads_of(reader, given, layer, same) for layer in range(len(windows))]
    kv_heads = reader.optional_integer("num_global_key_value_heads") if reader.boolean("attention_k_eq_v") else None
    full = (kv_heads or uniform.num_kv_heads, reader.integer("global_head_dim"))
    return [full if window is None else same for window in windows]


def _heads_of(reader: ConfigReader, given: Mapping[str, Any], layer: int, same: tuple[int, int]) -> tuple[int, int]:
    """Heads of a layer by per_layer_config, in which transformers 5 stores the sizes of some layers."""
    own = given.get(str(layer), {})
    if not isinstance(own, dict) or own.keys() - {"head_dim", "num_key_value_heads"}:
        raise ConfigError(
            f"{reader.place}: per_layer_config.{layer} is {shown(own)}; it must be an object with head_dim and "
            "num_key_value_heads alone"
        )
    sizes = ConfigReader(
        f"{reader.place}: per_layer_config.{layer}", own, {"num_key_value_heads": same[0], "head_dim": same[1]}
    )
    return sizes.integer("num_key_value_heads"), sizes.integer("head_dim")


def _intermediate_sizes(reader: ConfigReader, uniform: LayerShape, shares: Sequence[int | None]) -> list[int]:
    given = reader.raw("intermediate_size")
    if isinstance(given, list):
        if len(given) != len(shares) or any(type(size) is not int or size < 1 for size in given):
            raise reader.fail("intermediate_size", f"a whole number from 1 up, or a list of {len(shares)} of them")
        return given
    is_wide = reader.reads("use_double_wide_mlp") and reader.boolean("use_double_wide_mlp")
    return [uniform.intermediate_size * (2 if is_wide and source is not None else 1) for source in shares]


def _sparsity(reader: ConfigReader, family: Family, count: int) -> list[float]:
    """Share of zeros of each layer; without the key 0.95 in the first ten layers of more than ten."""
    if not family.altup:
        return [0.0] * count
    given = reader.raw("activation_sparsity_pattern")
    if given is None:
        return [0.95 if layer < 10 < count else 0.0 for layer in range(count)]
    numbers: list[Any] = given if isinstance(given, list) else [None]
    if len(numbers) != count or any(type(share) not in (int, float) or not 0 <= share < 1 for share in numbers):
        raise reader.fail("activation_sparsity_pattern", f"a list of {count} numbers from 0 up to 1, or null")
    return [float(share) for share in numbers]
