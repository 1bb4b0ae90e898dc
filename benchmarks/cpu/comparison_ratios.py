"""Ingot's engines next to the fastest peer of a cell, from its record alone.

The goal of a cell: the faster of Ingot's engines has at least 1.3 times the speed of the fastest peer, or its decode
reads at least 90 % of the measured memory bandwidth. A ratio is the median over rounds of the ratio of the two speeds,
with a 95 % bootstrap interval; "open" means that the interval contains 1.3.
"""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.cpu.rounds import interval
from benchmarks.hybrids import ALL_SHAPES, HybridShape
from benchmarks.peers import PEERS

LEAST_RATIO = 1.3
LEAST_SHARE = 0.9
Record = Mapping[str, Any]
Goal = Literal["met", "open", "not met"]


@dataclass(frozen=True)
class Comparison:
    """Ingot's faster engine and the fastest peer of a cell; `low` and `high` are None after a single round.

    share   of the memory bandwidth, of Ingot's engine; None for prefill and with neighbours
    """

    ours: str
    theirs: str
    ratio: float
    low: float | None
    high: float | None
    share: float | None

    @property
    def goal(self) -> Goal:
        """Compare the cell with its goal."""
        least, most = (self.ratio if end is None else end for end in (self.low, self.high))
        if least >= LEAST_RATIO or (self.share is not None and self.share >= LEAST_SHARE):
            return "met"
        return "open" if most >= LEAST_RATIO else "not met"


def compare(record: Record) -> Comparison | None:
    """The comparison of a cell; None where Ingot or all peers failed.

    Ingot's attention in bfloat16 counts only next to a peer that attends in bfloat16.
    """
    medians = {name: engine["median"] for name, engine in record["engines"].items()}
    theirs = max((name for name in medians if not PEERS[name].is_ours), key=medians.__getitem__, default=None)
    if theirs is None:
        return None
    equal = {"float32", PEERS[theirs].attention}
    ours = max(
        (name for name in medians if PEERS[name].is_ours and PEERS[name].attention in equal),
        key=medians.__getitem__,
        default=None,
    )
    if ours is None:
        return None
    return compare_engines(record, ours, theirs)


def compare_engines(record: Record, ours: str, theirs: str) -> Comparison | None:
    """The comparison of two engines, round by round; None where one of them failed."""
    engines = record["engines"]
    if not {ours, theirs} <= engines.keys():
        return None
    pairs = zip(engines[ours]["rounds"], engines[theirs]["rounds"], strict=True)
    ratios = [a["tokens_per_second"] / b["tokens_per_second"] for a, b in pairs]
    low, high = interval(ratios) if len(ratios) > 1 else (None, None)
    return Comparison(ours, theirs, statistics.median(ratios), low, high, bandwidth_share(record, engines[ours]))


def bandwidth_share(record: Record, engine: Record) -> float | None:
    """Bytes that decode reads per second over the cell's bandwidth; prefill is bound by arithmetic: None.

    A step reads the weights once for all sequences, and the keys and values of the tokens that the cell begins with.
    Of a mixture it reads only the experts that its tokens reach, of a hybrid it also reads and writes states; no record
    counts either: None.
    """
    shape = ALL_SHAPES[record["shape"]]
    if not record["steps"] or record["neighbours"] or shape.num_experts or isinstance(shape, HybridShape):
        return None
    facts = engine["facts"]
    cached = record["batch"] * record["prompt_tokens"]
    step_bytes = facts["weight_bytes"] + facts["kv_token_bytes"] * cached
    return float(step_bytes * engine["median"] / record["batch"] / record["bandwidth"])
