"""Mixtures of experts: how families describe them in config.json, and what a layer of one computes."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ingot.errors import ConfigError
from ingot.passes.numerics.experts import Routing, ScoreFunction
from ingot.pipeline.checkpoint.json_files import ConfigReader

SparseLayers = Literal["all", "step", "after-dense", "range", "listed", "listed-or-all", "listed-or-after-dense"]
MAX_EXPERTS = 4096
_METHODS = ("greedy", "group_limited_greedy")
NAMES: Mapping[str, str] = {
    "router": "gate",
    "fused_gate_up": "experts.gate_up_proj",
    "fused_down": "experts.down_proj",
    "fused_gate_up_bias": "experts.gate_up_proj_bias",
    "fused_down_bias": "experts.down_proj_bias",
}


@dataclass(frozen=True)
class ExpertRules:
    """Rules of a family's mixtures of experts. A key is one of config.json.

    count, chosen, width   keys of the number of experts, of those for each token, and of an expert's intermediate size
    other_keys             keys that older or newer versions use instead: Ingot's -> theirs
    switch                 key that switches the experts on; "" for none
    with_dense             the layers have a dense feed-forward as well, next to their experts
    sparse                 layers with experts: all; step: every decoder_sparse_step-th, without mlp_only_layers;
                           after-dense: from first_k_dense_replace on; range: every moe_layer_interval-th from
                           moe_layer_start_index to moe_layer_end_index; listed: by mlp_layer_types, or all but the
                           first; listed-or-all, listed-or-after-dense: so, or by that rule. The others have a
                           dense feed-forward
    score                  function that makes scores of the router's logits
    jitter_key             key of half the margin of sparsemixer
    normalise              the weights of a token are divided by their sum: always, never, or a key says so
    order_key              key of the order of the norm that divides them instead: 1, their sum, or null for none
    least_sum              least divisor: a number, or a key
    correction             the scores have a bias for the choice of experts: a vector, or a matrix of one row
    groups                 experts are chosen from topk_group of n_group groups
    scaled                 weights are multiplied by routed_scaling_factor; so they are with groups
    method_key             key of how: greedy, without groups; group_limited_greedy, where the best expert ranks a group
    shared                 key of the intermediate size of the experts that compute every token; "" for none.
                           shared_count: the key has their number
    shared_gate            their result is multiplied by the sigmoid of a linear layer with one row
    biases                 the router and the experts' layers have biases
    may_be_transposed      tensors of all experts may be [experts, in, out]
    latent                 key of the width that experts compute in, between two linear layers; "" for none
    stacked                tensors of all experts are [experts * inner size, hidden size], down projections transposed
    in_turns               tensors of all experts are [experts, in, out], with columns of gate and up in turns
    clamp                  keys of alpha and limit of a clamped SwiGLU, which takes the place of the activation
    names                  how checkpoints name a layer's tensors, in addition to NAMES: one alternative or several
    without                the number of experts may be 0, and a layer then has the shared ones alone, under these names
    optional               the number of experts may be 0, and all layers are dense then
    """

    count: str
    chosen: str
    width: str
    other_keys: Mapping[str, str] = field(default_factory=dict)
    switch: str = ""
    with_dense: bool = False
    sparse: SparseLayers = "all"
    score: ScoreFunction = "softmax"
    jitter_key: str = ""
    normalise: bool | str = True
    order_key: str = ""
    least_sum: float | str = 0.0
    correction: Literal["none", "vector", "row"] = "none"
    groups: bool = False
    scaled: bool = False
    method_key: str = ""
    shared: str = ""
    shared_count: bool = False
    shared_gate: bool = False
    biases: bool = False
    may_be_transposed: bool = False
    latent: str = ""
    stacked: bool = False
    in_turns: bool = False
    clamp: tuple[str, str] | None = None
    names: tuple[Mapping[str, str], ...] = ({},)
    without: Mapping[str, str] = field(default_factory=dict)
    optional: bool = False


@dataclass(frozen=True)
class ExpertsConfig:
    """The experts of one layer.

    count         number of experts; inner_size: their intermediate size
    shared_size   intermediate size of the feed-forward that computes every token; 0 for none
    clamp         alpha and limit of a clamped SwiGLU; None: the activation of config.json
    latent_size   width of the experts' inputs and results; 0: hidden_size
    """

    count: int
    inner_size: int
    routing: Routing
    shared_size: int = 0
    clamp: tuple[float, float] | None = None
    latent_size: int = 0


def read_experts(reader: ConfigReader, rules: ExpertRules | None, num_layers: int) -> tuple[ExpertsConfig | None, ...]:
    """The experts of each layer; None for a dense layer.

    Raises ConfigError for numbers that contradict each other, with the keys.
    """
    if rules is None or has_no_experts(reader, rules) or (rules.switch and not reader.boolean(rules.switch)):
        return (None,) * num_layers
    count = reader.integer(_key(reader, rules, rules.count))
    if count > MAX_EXPERTS:
        raise reader.fail(_key(reader, rules, rules.count), f"at most {MAX_EXPERTS}")
    chosen = _chosen(reader, rules, count, num_layers)
    sparse = _sparse_layers(reader, rules, num_layers)
    width = reader.integer(rules.width)
    shared = _shared_size(reader, rules, width)
    by_best = bool(rules.method_key) and reader.choice(rules.method_key, _METHODS) == _METHODS[1]
    groups = _groups(reader, count) if rules.groups and (by_best or not rules.method_key) else (1, 1)
    least = reader.number(rules.least_sum) if isinstance(rules.least_sum, str) else rules.least_sum
    normalise = _normalises(reader, rules)
    scale = reader.number("routed_scaling_factor") if rules.groups or rules.scaled else 1.0
    clamp = None if rules.clamp is None else (reader.number(rules.clamp[0]), reader.number(rules.clamp[1]))
    latent = (reader.optional_integer(rules.latent) or 0) if rules.latent else 0
    margin = 2 * reader.number(rules.jitter_key, positive=False) if rules.jitter_key else 0.0
    found = []
    for layer in range(num_layers):
        best = 1 if by_best else 2
        routing = Routing(chosen[layer], rules.score, *groups, normalise, least, scale, best, margin)
        found.append(ExpertsConfig(count, width, routing, shared, clamp, latent) if layer in sparse else None)
    return tuple(found)


def has_no_experts(reader: ConfigReader, rules: ExpertRules) -> bool:
    """Whether the number of experts is 0, in a family that allows it."""
    return bool(rules.without or rules.optional) and reader.integer(_key(reader, rules, rules.count), minimum=0) == 0


def expert_names(rules: ExpertRules, tensors: Collection[str]) -> Mapping[str, str]:
    """Return a checkpoint's names of a layer's tensors: part of a path -> its own. The first, if it has none."""
    alternatives = [{**NAMES, **names} for names in rules.names]
    path = "mlp.router.weight" if rules.correction == "none" else "mlp.correction_bias"
    return next((names for names in alternatives if _has(tensors, path, names)), alternatives[0])


def has_fused_experts(tensors: Collection[str], names: Mapping[str, str]) -> bool:
    """Whether the experts of a layer are one tensor [experts, rows, columns], not one for each expert."""
    return any(_has(tensors, f"{block}.fused_gate_up", names) for block in ("mlp", "moe"))


def has_transposed_experts(shapes: Mapping[str, tuple[int, ...]], names: Mapping[str, str], hidden_size: int) -> bool:
    """Whether the tensor of all experts' gate and up projections is [experts, in, out]."""
    end = f".{names.get('mlp', 'mlp')}.{names['fused_gate_up']}"
    found = next((shape for name, shape in shapes.items() if name.endswith(end)), ())
    return len(found) == 3 and found[1] == hidden_size


def _has(tensors: Collection[str], path: str, names: Mapping[str, str]) -> bool:
    end = "." + ".".join(filter(None, (names.get(part, part) for part in path.split("."))))
    return any(name.endswith(end) for name in tensors)


def _key(reader: ConfigReader, rules: ExpertRules, key: str) -> str:
    """The key, or the other name that config.json has instead."""
    other = rules.other_keys.get(key)
    return other if other is not None and key not in reader.values and other in reader.values else key


def _chosen(reader: ConfigReader, rules: ExpertRules, count: int, num_layers: int) -> list[int]:
    """Experts for each token, layer by layer: one number, or a list."""
    key = _key(reader, rules, rules.chosen)
    given: Any = reader.raw(key)
    numbers = given if isinstance(given, list) else [reader.integer(key)] * num_layers
    if len(numbers) < num_layers or any(type(number) is not int or number < 1 for number in numbers):
        raise reader.fail(key, f"a whole number from 1 up, or a list of {num_layers} of them")
    if max(numbers) > count:
        raise reader.fail(key, f"at most the number of experts, {_key(reader, rules, rules.count)} = {count}")
    return numbers[:num_layers]


def _sparse_layers(reader: ConfigReader, rules: ExpertRules, num_layers: int) -> frozenset[int]:
    layers = range(num_layers)
    match rules.sparse:
        case "listed" | "listed-or-all" | "listed-or-after-dense" if reader.raw("mlp_layer_types") is not None:
            return _listed_layers(reader, num_layers)
        case "step":
            step, dense = reader.integer("decoder_sparse_step"), reader.integers("mlp_only_layers") or ()
            return frozenset(layer for layer in layers if (layer + 1) % step == 0 and layer not in dense)
        case "after-dense" | "listed-or-after-dense":
            return frozenset(layers[reader.integer("first_k_dense_replace", minimum=0) :])
        case "range":
            first, step = reader.integer("moe_layer_start_index", minimum=0), reader.integer("moe_layer_interval")
            last = reader.integer("moe_layer_end_index", minimum=-1)
            last = num_layers - 1 if last == -1 else last
            return frozenset(layer for layer in layers[first : last + 1] if (layer + 1) % step == 0)
        case "listed":
            return frozenset(layers[1:])
        case _:
            return frozenset(layers)


def _listed_layers(reader: ConfigReader, num_layers: int) -> frozenset[int]:
    types = reader.raw("mlp_layer_types")
    is_list = isinstance(types, list) and len(types) == num_layers
    if not is_list or any(kind not in ("dense", "sparse") for kind in types):
        raise reader.fail("mlp_layer_types", f"a list of {num_layers} values, each 'dense' or 'sparse', or null")
    return frozenset(layer for layer, kind in enumerate(types) if kind == "sparse")


def _normalises(reader: ConfigReader, rules: ExpertRules) -> bool:
    if rules.order_key:
        order = reader.optional_number(rules.order_key)
        if order not in (None, 1.0):
            raise reader.fail(rules.order_key, "1, so that weights are divided by their sum, or null")
        return order is not None
    return reader.boolean(rules.normalise) if isinstance(rules.normalise, str) else rules.normalise


def _shared_size(reader: ConfigReader, rules: ExpertRules, width: int) -> int:
    if not rules.shared:
        return 0
    return reader.integer(rules.shared, minimum=0) * (width if rules.shared_count else 1)


def _groups(reader: ConfigReader, count: int) -> tuple[int, int]:
    """The groups, and those that are chosen."""
    groups, chosen = reader.integer("n_group"), reader.integer("topk_group")
    if count % groups or (groups > 1 and count < 2 * groups):
        raise reader.fail("n_group", f"a divisor of the number of experts, {count}, with at least two in a group")
    if chosen > groups:
        raise reader.fail("topk_group", f"at most n_group, {groups}")
    per_group, needed = count // groups, reader.integer("num_experts_per_tok")
    if chosen * per_group < needed:
        raise ConfigError(
            f"{reader.place}: num_experts_per_tok is {needed}, but topk_group groups ({chosen}) hold only "
            f"{chosen * per_group} experts"
        )
    return groups, chosen
