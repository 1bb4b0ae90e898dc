"""Recurrent layers: how families describe them in config.json, and what each layer of one computes."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ingot.errors import ConfigError
from ingot.pipeline.checkpoint.json_files import ConfigReader

MixerKind = Literal["convolution", "delta-rule", "scan"]
GateNorm = Literal["before-gate", "after-gate", "none"]


@dataclass(frozen=True)
class RecurrentRules:
    """Rules of a family's recurrent layers. A key is one of config.json.

    kind            what a layer computes: a gated short convolution, a gated delta rule, or the scan of Mamba-2
    layers          which layers are recurrent: those that layer_types lists, or without it
                    interval: all but every full_attention_interval-th; fourth: all but every fourth, or the last of
                    fewer; all; not-full: those that are not in full_attn_idxs; missing: layer_types is required.
                    Without layer_types: indices: those that are not in attn_layer_indices; both: all, and all have
                    attention too; pattern: by layers_block_type or hybrid_override_pattern, and each layer is one half
                    of a usual one: attention, a recurrent layer, a feed-forward, or a mixture of experts
    keys            Ingot's name of a size -> the family's key
    interleaved     rows of in_proj_qkvz and in_proj_ba are those of the first key head, then of the next
    separate        queries, keys and values have linear layers of their own, and convolutions too, except in a
                    checkpoint whose tensors have other_names
    other_names     names of a checkpoint with one convolution, in addition to the family's
    saved_names     name -> the one that transformers saves in its place
    negative        key: the factor of beta is 2
    norm_place      place of a recurrent layer's norms
    gate_norm       the norm of the result, before it is multiplied by the gate's activation or after; or a key says
                    whether there is one and a second key whether it is before. gate_epsilon: its epsilon; 0: that of
                    the model
    least_time      key of the least dt; "": time_step_limit has the least and the largest
    multiplied      the layer's inputs, its parts and its result have multipliers of config.json
    """

    kind: MixerKind
    layers: Literal["interval", "fourth", "all", "not-full", "missing", "indices", "both", "pattern"]
    keys: Mapping[str, str] = field(default_factory=dict)
    interleaved: bool = False
    separate: bool = False
    other_names: Mapping[str, str] = field(default_factory=dict)
    saved_names: Mapping[str, str] = field(default_factory=dict)
    negative: str = ""
    norm_place: Literal["", "before"] = ""
    gate_norm: GateNorm | tuple[str, str] = "before-gate"
    gate_epsilon: float = 0.0
    least_time: str = ""
    multiplied: bool = False


@dataclass(frozen=True)
class ConvolutionConfig:
    """out_proj(c * convolution(b * x)), where b, c and x are the thirds of in_proj's result."""

    width: int
    bias: bool


@dataclass(frozen=True)
class DeltaRuleConfig:
    """A convolution of queries, keys and values, a gated delta rule over them, a norm, a gate.

    beta_factor    factor of the sigmoid that makes beta
    convolutions   part that has a convolution of its own, such as "q" -> its channels; {}: one for all
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    width: int
    beta_factor: float
    norm_epsilon: float
    convolutions: Mapping[str, int] = field(default_factory=dict, hash=False)

    @property
    def key_columns(self) -> int:
        """Width of all queries, and of all keys."""
        return self.num_key_heads * self.key_dim

    @property
    def value_columns(self) -> int:
        """Width of all values, and of the gate."""
        return self.num_value_heads * self.value_dim


@dataclass(frozen=True)
class ScanConfig:
    """A convolution of x, B and C, the scan of Mamba-2 over them, a gate, a norm.

    bias, out_bias of in_proj, of out_proj
    time_limits    dt is clamped to them
    multipliers    of the result: of in_proj's input, then of its parts gate, x, B, C and dt, then of out_proj's result
    """

    num_heads: int
    head_dim: int
    state_dim: int
    num_groups: int
    width: int
    conv_bias: bool
    bias: bool
    out_bias: bool
    time_limits: tuple[float, float]
    gate_norm: GateNorm
    norm_epsilon: float
    multipliers: tuple[float, ...] = (1.0,) * 7

    @property
    def inner(self) -> int:
        """Width of all heads."""
        return self.num_heads * self.head_dim

    @property
    def shared(self) -> int:
        """Width of B, and of C, of all groups."""
        return self.num_groups * self.state_dim


RecurrentConfig = ConvolutionConfig | DeltaRuleConfig | ScanConfig


@dataclass(frozen=True)
class BranchMultipliers:
    """Factors of attention's input and result, and of the feed-forward's gate and result."""

    attention_in: float = 1.0
    attention_out: float = 1.0
    gate: float = 1.0
    down: float = 1.0


def read_branch_multipliers(reader: ConfigReader) -> BranchMultipliers:
    """Read the multipliers of Falcon-H1."""
    of_mlp = (1.0, 1.0) if reader.raw("mlp_multipliers") is None else reader.numbers("mlp_multipliers", 2)
    attention = (reader.number(f"attention_{side}_multiplier") for side in ("in", "out"))
    return BranchMultipliers(*attention, *of_mlp)


def convolution_feed_forward(reader: ConfigReader) -> int:
    """The width of an LFM2 feed-forward: intermediate_size, or two thirds of it, scaled and rounded up."""
    size = reader.integer("intermediate_size")
    if not reader.boolean("block_auto_adjust_ff_dim"):
        return size
    size = int(2 * size / 3)
    factor = reader.optional_number("block_ffn_dim_multiplier")
    if factor is None:
        return size
    step = reader.integer("block_multiple_of")
    return -(-int(factor * size) // step) * step


def has_one_convolution(tensors: Collection[str]) -> bool:
    """Whether the checkpoint's layers have one convolution of queries, keys and values."""
    return any(name.endswith(".conv1d.weight") for name in tensors)


def read_recurrent(
    reader: ConfigReader, rules: RecurrentRules, tensors: Mapping[str, tuple[int, ...]]
) -> RecurrentConfig:
    """Read the sizes of the family's recurrent layers, in a checkpoint with these tensors.

    ConfigError for sizes that contradict each other, with the keys.
    """
    sizes = _Sizes(reader, rules.keys)
    match rules.kind:
        case "convolution":
            return ConvolutionConfig(sizes.integer("width", 2), reader.boolean("conv_bias"))
        case "delta-rule":
            found = _delta_rule(reader, rules, sizes)
            own = rules.separate and not has_one_convolution(tensors)
            return replace(found, convolutions=_convolutions(found, tensors)) if own else found
        case _:
            return _scan(reader, rules, sizes)


def _convolutions(of: DeltaRuleConfig, tensors: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Channels of each part; transformers saves one convolution in thirds, though values have more than keys."""
    total = 2 * of.key_columns + of.value_columns
    third = -(-total // 3)
    stored = next((shape for name, shape in tensors.items() if name.endswith(".q_conv1d.weight")), ())
    if stored[:1] == (third,):
        return {"q": third, "k": third, "v": total - 2 * third}
    return {"q": of.key_columns, "k": of.key_columns, "v": of.value_columns}


@dataclass(frozen=True)
class _Sizes:
    """Sizes under the family's own keys."""

    reader: ConfigReader
    keys: Mapping[str, str]

    def key(self, name: str) -> str:
        return self.keys.get(name, name)

    def integer(self, name: str, minimum: int = 1) -> int:
        return self.reader.integer(self.key(name), minimum)


def _delta_rule(reader: ConfigReader, rules: RecurrentRules, sizes: _Sizes) -> DeltaRuleConfig:
    defaults = reader.integer("num_attention_heads")
    heads = [reader.optional_integer(key) or defaults for key in ("linear_num_key_heads", "linear_num_value_heads")]
    if heads[1] % heads[0]:
        raise ConfigError(
            f"{reader.place}: linear_num_value_heads is {heads[1]} and linear_num_key_heads is {heads[0]}; the first "
            "must be a multiple of the second"
        )
    key_dim = reader.optional_integer("linear_key_head_dim") or int(0.75 * reader.integer("hidden_size") / heads[0])
    value_dim = reader.optional_integer("linear_value_head_dim") or 2 * key_dim
    doubled = bool(rules.negative) and reader.boolean(rules.negative)
    epsilon = rules.gate_epsilon or reader.number("rms_norm_eps")
    width = sizes.integer("width", 2)
    return DeltaRuleConfig(heads[0], heads[1], key_dim, value_dim, width, 2.0 if doubled else 1.0, epsilon)


def _scan(reader: ConfigReader, rules: RecurrentRules, sizes: _Sizes) -> ScanConfig:
    heads, groups = sizes.integer("heads"), sizes.integer("groups")
    head_dim = _head_dim(reader, sizes, heads)
    if heads % groups:
        raise ConfigError(
            f"{reader.place}: {sizes.key('heads')} is {heads} and {sizes.key('groups')} is {groups}; the first must be "
            "a multiple of the second"
        )
    return ScanConfig(
        num_heads=heads,
        head_dim=head_dim,
        state_dim=sizes.integer("state"),
        num_groups=groups,
        width=sizes.integer("width", 2),
        conv_bias=reader.boolean(sizes.key("conv_bias")),
        bias=reader.boolean(sizes.key("bias")),
        out_bias=reader.boolean(sizes.key("out_bias")),
        time_limits=_time_limits(reader, rules.least_time),
        gate_norm=_gate_norm(reader, rules),
        norm_epsilon=reader.number(sizes.key("epsilon")),
        multipliers=_multipliers(reader) if rules.multiplied else (1.0,) * 7,
    )


def _head_dim(reader: ConfigReader, sizes: _Sizes, heads: int) -> int:
    """The width of a head: given, or that of all heads divided by their number; both must agree."""
    if sizes.key("expand") not in reader.defaults:
        return sizes.integer("head_dim")
    inner_key = sizes.keys.get("inner")
    inner = reader.optional_integer(inner_key) if inner_key else None
    total = inner or sizes.integer("expand") * reader.integer("hidden_size")
    what = inner_key if inner else f"{sizes.key('expand')} * hidden_size"
    head_dim = total // heads if reader.raw(sizes.key("head_dim")) == "auto" else sizes.integer("head_dim")
    if head_dim * heads != total:
        raise ConfigError(
            f"{reader.place}: {sizes.key('heads')} ({heads}) times {sizes.key('head_dim')} ({head_dim}) must be "
            f"{what}, {total}"
        )
    return head_dim


def _time_limits(reader: ConfigReader, least_key: str) -> tuple[float, float]:
    if least_key:
        return reader.number(least_key), math.inf
    given = reader.raw("time_step_limit")
    if given is None:
        return 0.0, math.inf
    numbers = [_number(limit) for limit in given] if isinstance(given, list | tuple) else []
    if len(numbers) != 2 or not 0 <= numbers[0] < numbers[1]:
        raise reader.fail("time_step_limit", "a list of two numbers, 0 or more, the first below the second, or null")
    return numbers[0], numbers[1]


def _number(value: Any) -> float:
    """The number, which may be written as {"__float__": "Infinity"} or "inf"; NaN for anything else."""
    if isinstance(value, dict):
        value = value.get("__float__")
    if isinstance(value, str) and value in ("Infinity", "inf"):
        return math.inf
    return float(value) if type(value) in (int, float) else math.nan


def _gate_norm(reader: ConfigReader, rules: RecurrentRules) -> GateNorm:
    if isinstance(rules.gate_norm, str):
        return rules.gate_norm
    has_norm, is_before = rules.gate_norm
    if not reader.boolean(has_norm):
        return "none"
    return "before-gate" if reader.boolean(is_before) else "after-gate"


def _multipliers(reader: ConfigReader) -> tuple[float, ...]:
    parts = reader.raw("ssm_multipliers")
    of_parts = (1.0,) * 5 if parts is None else reader.numbers("ssm_multipliers", 5)
    return (reader.number("ssm_in_multiplier"), *of_parts, reader.number("ssm_out_multiplier"))
