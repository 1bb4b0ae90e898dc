"""The arithmetic of serving in closed form: every formula once, in SI units, for plans, pages and worked examples."""

import math
from collections.abc import Sequence

HOURS_PER_MONTH = 730
DAYS_PER_MONTH = 30


def weight_bytes(parameters: float, bits: float) -> float:
    """Bytes of weights of so many bits: parameters x bits / 8."""
    return parameters * bits / 8


def read_seconds(num_bytes: float, bandwidth: float) -> float:
    """Seconds to read bytes once: bytes / bandwidth. For all weights of a model, the floor of a decode step."""
    return num_bytes / bandwidth


def tokens_per_second(step_seconds: float, batch: float = 1) -> float:
    """Tokens a second of a batch that gets a token in every step: batch / seconds."""
    return batch / step_seconds


def matmul_intensity(rows: float, out: int, columns: int, weight_bits: float, value_bytes: float = 2) -> float:
    """Operations for each byte that a matmul [rows, columns] x [columns, out] moves.

    2 rows columns out / (columns out bits / 8 + (rows columns + rows out) value_bytes)
    """
    moved = columns * out * weight_bits / 8 + rows * (columns + out) * value_bytes
    return 2 * rows * columns * out / moved


def accepted_tokens(acceptance: float, drafted: int) -> float:
    """Tokens of a verified step: (1 - a^(g + 1)) / (1 - a) for acceptance a of each of g drafted tokens.

    Leviathan, Kalman and Matias, Fast Inference from Transformers via Speculative Decoding (2023), equation 1.
    """
    if acceptance >= 1:
        return drafted + 1.0
    return (1 - acceptance ** (drafted + 1)) / (1 - acceptance)


def speculative_speedup(acceptance: float, drafted: int, step_seconds: float, draft_seconds: float) -> float:
    """Speedup over plain decoding: tau T / (T + g t), where a draft of one token takes t seconds and a step T."""
    tau = accepted_tokens(acceptance, drafted)
    return tau * step_seconds / (step_seconds + drafted * draft_seconds)


def goodput(rate: float, missed_share: float) -> float:
    """Requests a second that meet their service level: rate x (1 - share that misses it)."""
    return rate * (1 - missed_share)


def mean_itl(intervals: Sequence[Sequence[float]]) -> float:
    """Mean seconds between tokens, over all tokens of all requests: long outputs count more."""
    count = sum(len(request) for request in intervals)
    return sum(map(sum, intervals)) / count


def mean_tpot(intervals: Sequence[Sequence[float]]) -> float:
    """Mean over requests of each one's mean seconds between tokens: every request counts the same."""
    return sum(sum(request) / len(request) for request in intervals) / len(intervals)


def cost_per_thousand(price_per_hour: float, tokens_a_second: float) -> float:
    """Dollars for 1,000 tokens: price / (3,600 x tokens a second) x 1,000."""
    return price_per_hour / (3600 * tokens_a_second) * 1000


def cost_per_month(price_per_hour: float, devices: int = 1) -> float:
    """Dollars for a month of devices that run all the time: price x 730 hours x devices."""
    return price_per_hour * HOURS_PER_MONTH * devices


def api_cost_per_month(tokens_a_day: float, price_per_thousand: float) -> float:
    """Dollars for a month of tokens by an API: tokens / 1,000 x price x 30 days."""
    return tokens_a_day / 1000 * price_per_thousand * DAYS_PER_MONTH


def users_per_node(devices: int, device_bytes: float, weights: float, user_bytes: float) -> int:
    """Users whose KV fits in a node next to one copy of the weights: floor((devices x memory - weights) / KV)."""
    return max(0, math.floor((devices * device_bytes - weights) / user_bytes))


def compression(pruned_share: float, bits: float, from_bits: float = 16) -> float:
    """How many times smaller weights are after pruning and quantizing: (from / bits) / (1 - share)."""
    return from_bits / bits / (1 - pruned_share)
