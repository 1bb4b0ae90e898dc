"""The tensors of recurrent layers, by path in the layer, and the keys of config.json that determine their shapes."""

from ingot.pipeline.checkpoint.config.recurrent import (
    ConvolutionConfig,
    DeltaRuleConfig,
    RecurrentConfig,
    RecurrentRules,
    ScanConfig,
)

_Tensors = dict[str, tuple[tuple[int, ...], str]]


def recurrent_tensors(config: RecurrentConfig, rules: RecurrentRules, hidden: int) -> _Tensors:
    """Path in the layer -> shape, and the keys that determine it."""
    match config:
        case ConvolutionConfig():
            return _convolution_tensors(config, hidden)
        case DeltaRuleConfig():
            return _delta_rule_tensors(config, rules, hidden)
        case ScanConfig():
            return _scan_tensors(config, rules, hidden)


def _convolution_tensors(config: ConvolutionConfig, hidden: int) -> _Tensors:
    found: _Tensors = {
        "in_proj.weight": ((3 * hidden, hidden), "hidden_size"),
        "conv1d.weight": ((hidden, 1, config.width), "hidden_size, conv_L_cache"),
        "out_proj.weight": ((hidden, hidden), "hidden_size"),
    }
    if config.bias:
        rows = {"in_proj": 3 * hidden, "conv1d": hidden, "out_proj": hidden}
        found |= {f"{name}.bias": ((count,), "hidden_size, conv_bias") for name, count in rows.items()}
    return found


def _delta_rule_tensors(config: DeltaRuleConfig, rules: RecurrentRules, hidden: int) -> _Tensors:
    key_keys, value_keys = "linear_num_key_heads, linear_key_head_dim", "linear_num_value_heads, linear_value_head_dim"
    keys, values, heads = config.key_columns, config.value_columns, config.num_value_heads
    both, width = f"{key_keys}, {value_keys}", "linear_conv_kernel_dim"
    parts = {"q": (keys, key_keys), "k": (keys, key_keys), "v": (values, value_keys)}
    convolutions = {f"{name}_conv1d": (rows, parts[name][1]) for name, rows in config.convolutions.items()}
    convolutions = convolutions or {"conv1d": (2 * keys + values, both)}
    rows: dict[str, tuple[int, str]]
    if rules.separate:
        rows = {f"{name}_proj": part for name, part in parts.items()}
        rows |= {"in_proj_z": (values, value_keys)} | dict.fromkeys(("in_proj_b", "in_proj_a"), (heads, value_keys))
    elif rules.interleaved:
        rows = {"in_proj_qkvz": (2 * keys + 2 * values, both), "in_proj_ba": (2 * heads, value_keys)}
    else:
        rows = {"in_proj_qkv": (2 * keys + values, both), "in_proj_z": (values, value_keys)}
        rows |= dict.fromkeys(("in_proj_b", "in_proj_a"), (heads, value_keys))
    found: _Tensors = {
        f"{name}.weight": ((count, hidden), f"{says}, hidden_size") for name, (count, says) in rows.items()
    }
    found |= {
        f"{name}.weight": ((count, 1, config.width), f"{says}, {width}") for name, (count, says) in convolutions.items()
    }
    return found | {
        "dt_bias": ((heads,), "linear_num_value_heads"),
        "A_log": ((heads,), "linear_num_value_heads"),
        "gate_norm.weight": ((config.value_dim,), "linear_value_head_dim"),
        "out_proj.weight": ((hidden, values), f"hidden_size, {value_keys}"),
    }


def _scan_tensors(config: ScanConfig, rules: RecurrentRules, hidden: int) -> _Tensors:
    keys = {name: rules.keys.get(name, name) for name in ("heads", "head_dim", "state", "groups", "width")}
    inner_keys, of_heads = f"{keys['heads']}, {keys['head_dim']}", keys["heads"]
    mixed = config.inner + 2 * config.shared
    rows, all_keys = config.inner + mixed + config.num_heads, f"{inner_keys}, {keys['groups']}, {keys['state']}"
    found: _Tensors = {
        "in_proj.weight": ((rows, hidden), f"{all_keys}, hidden_size"),
        "conv1d.weight": ((mixed, 1, config.width), f"{all_keys}, {keys['width']}"),
        "out_proj.weight": ((hidden, config.inner), f"hidden_size, {inner_keys}"),
    }
    found |= dict.fromkeys(("dt_bias", "A_log", "D"), ((config.num_heads,), of_heads))
    if config.gate_norm != "none":
        found["gate_norm.weight"] = ((config.inner,), inner_keys)
    if config.conv_bias:
        found["conv1d.bias"] = ((mixed,), all_keys)
    if config.bias:
        found["in_proj.bias"] = ((rows,), all_keys)
    if config.out_bias:
        found["out_proj.bias"] = ((hidden,), "hidden_size")
    return found
