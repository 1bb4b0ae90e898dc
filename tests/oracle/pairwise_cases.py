"""Configurations of the families without random ones that cover each pair of values of their fields.

A field is a key of config.json, or several that are set together ("a+b"), but for `heads` (query and KV heads), `rope`
and `spelling` (of the rope parameters, or of the sizes of full layers), `experts` (their number, and those for each
token), `groups` (and those that are chosen), `is_fused`, and `written`: keys of the configuration, and changes of the
config.json that is made of it.
"""

import random
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

from ingot.pipeline.checkpoint.families import FAMILIES
from tests.oracle.cases import LENGTHS, Case
from tests.oracle.pairwise_fields import DENSE_FIELDS, LATENT_FIELDS, MOE_FIELDS, Fields
from tests.oracle.pairwise_hybrid_fields import HYBRID_FIELDS, UNEQUAL_FIELDS

Row = dict[str, Any]

FIELDS: Mapping[str, Fields] = {**DENSE_FIELDS, **MOE_FIELDS, **LATENT_FIELDS, **HYBRID_FIELDS, **UNEQUAL_FIELDS}
_SHORT = (3, 11, 7)  # beyond the windows, chunks and convolutions of these families
DTYPES = ("float32", "float16", "bfloat16")

_NOT_KEYS = ("experts", "groups", "heads", "is_fused", "layers", "rope", "spelling", "written")


def pairwise_rows(fields: Fields, seed: int = 0) -> list[Row]:
    """Rows of values, one for each field, in which every two values of two fields meet: greedy, 30 tries for each."""
    chance, rows = random.Random(seed), list[Row]()
    missing = set(pairs_of_all(fields))
    while missing:
        first = min(missing)  # of the sorted pairs, so that each row covers one at least
        tries = [_row_with(fields, first, chance) for _ in range(30)]
        best = max(tries, key=lambda row: len(missing.intersection(pairs_in(row, fields))))
        rows.append(best)
        missing.difference_update(pairs_in(best, fields))
    return rows


Pair = tuple[str, int, str, int]  # two fields, and the places of their values


def pairs_of_all(fields: Fields) -> Iterator[Pair]:
    """Every pair of values of two fields."""
    for one, other in combinations(sorted(fields), 2):
        yield from ((one, i, other, j) for i in range(len(fields[one])) for j in range(len(fields[other])))


def pairs_in(row: Row, fields: Fields) -> Iterator[Pair]:
    """The pairs that a row covers."""
    places = {name: fields[name].index(value) for name, value in row.items()}
    yield from ((one, places[one], other, places[other]) for one, other in combinations(sorted(row), 2))


def _row_with(fields: Fields, pair: Pair, chance: random.Random) -> Row:
    row = {name: chance.choice(list(values)) for name, values in fields.items()}
    return row | {pair[0]: fields[pair[0]][pair[1]], pair[2]: fields[pair[2]][pair[3]]}


def pairwise_cases(model_type: str) -> list[Case]:
    """Tiny checkpoints of the family that cover all pairs."""
    rows = pairwise_rows(FIELDS[model_type])
    return [_case(model_type, number, row) for number, row in enumerate(rows)]


def _case(model_type: str, number: int, row: Row) -> Case:
    config: Row = {"num_hidden_layers": 4 if "layers" in row else 2}
    for name, value in row.items():
        if name not in _NOT_KEYS:
            config |= dict(zip(name.split("+"), value, strict=True)) if "+" in name else {name: value}
    if "experts" in row:
        config |= _experts(model_type, row)
    if "heads" in row:
        config["num_attention_heads"], config["num_key_value_heads"] = row["heads"]
    if model_type == "helium":
        config["head_dim"] = 32 // row["heads"][0]  # o_proj is square
    if model_type in ("gpt2", "gpt_bigcode", "gptj", "codegen", "openai-gpt"):
        config |= {"n_embd": 32, "n_layer": 2, "n_positions": 64}
        del config["num_hidden_layers"]
    if model_type == "xglm":
        config |= {"d_model": 32, "num_layers": 2}
    rewrite = _place_layers(row, config)
    rewrite |= _place_rope(model_type, row, config)
    if "global_head_dim" in config and row["spelling"] == "old":
        sizes = ("global_head_dim", "num_global_key_value_heads")
        rewrite |= {"per_layer_config": None, **{key: config[key] for key in sizes}}
    keys, changes = row.get("written", ({}, {}))
    return Case(
        f"{model_type}-{number}",
        model_type,
        config | keys,
        dtype=DTYPES[number % 3],  # type: ignore[arg-type]
        rewrite=rewrite | changes,
        lengths=_SHORT if model_type in HYBRID_FIELDS or model_type in UNEQUAL_FIELDS else LENGTHS,
        is_fused=row.get("is_fused", False),
    )


def _experts(model_type: str, row: Row) -> Row:
    rules = FAMILIES[model_type].experts
    assert rules is not None
    config = dict(zip((rules.count, rules.chosen), row["experts"], strict=True))
    return config | (dict(zip(("n_group", "topk_group"), row["groups"], strict=True)) if "groups" in row else {})


def _place_layers(row: Row, config: Row) -> Row:
    """layer_types as a list, or removed from config.json: the family's rule, or another pattern."""
    if "layers" not in row:
        return {}
    full, sliding = "full_attention", "sliding_attention"
    if row["sliding_window"] is None:
        config["layer_types"] = [full] * 4
        return {}
    if row["layers"] == "named":
        config["layer_types"] = [full, sliding, sliding, full]
        return {}
    return {"layer_types": None} | ({"sliding_window_pattern": 3} if row["layers"] == "by pattern" else {})


def _place_rope(model_type: str, row: Row, config: Row) -> Row:
    """Rope parameters in the configuration, or config.json's older spelling of the same."""
    rope = row.get("rope")
    if not rope:
        return {}
    if model_type == "olmo3":
        config["rope_parameters"] = {
            "full_attention": rope,
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        }
        return {}
    config["rope_parameters"] = dict(rope)  # transformers adds keys
    if row.get("spelling") != "old" or (model_type == "apertus" and rope["rope_type"] == "default"):
        return {}  # Apertus scales its rope unless rope_parameters says otherwise
    theta, part = {"gpt_neox": ("rotary_emb_base", "rotary_pct")}.get(
        model_type, ("rope_theta", "partial_rotary_factor")
    )
    changes: Row = {"rope_parameters": None, theta: rope["rope_theta"]}
    if "partial_rotary_factor" in rope:
        changes[part] = rope["partial_rotary_factor"]
    if rope["rope_type"] != "default":
        kept = {
            key: value for key, value in rope.items() if key not in ("rope_theta", "partial_rotary_factor", "rope_type")
        }
        changes["rope_scaling"] = {"type": rope["rope_type"], **kept}
    return changes
