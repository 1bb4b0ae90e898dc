"""Requests, tokens and cost by the holder of an API key, as /metrics has them."""

from collections import Counter

MOST_KEYS = 100  # each with a row is a label value, which a monitoring system keeps for ever
OTHERS, IDLE = "others", "idle"


class KeyUsage:
    """Totals by the group of a holder: the beginning of its key's digest, as in the log of requests.

    The first `MOST_KEYS` that are seen have rows of their own, also after their keys are gone; the rest is one row.
    """

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()
        self.prompt_tokens: Counter[str] = Counter()
        self.output_tokens: Counter[str] = Counter()
        self._costs: dict[str, float] = {}
        self._shared_cost = 0.0
        self._shared_tokens: Counter[str] = Counter()

    def count(self, group: str, prompt_tokens: int, output_tokens: int) -> None:
        """Add a request that has ended. One without a key is not counted."""
        if not group:
            return
        key = group if group in self.requests or len(self.requests) < MOST_KEYS else OTHERS
        self.requests[key] += 1
        self.prompt_tokens[key] += prompt_tokens
        self.output_tokens[key] += output_tokens

    def costs(self, total: float) -> dict[str, float]:
        """The cost so far of each key, and of idle time; their sum is the total.

        What it grew by since the last call is shared by the tokens, of prompts and outputs, of the requests that have
        ended since; without any it is that of idle time.
        """
        tokens = self.prompt_tokens + self.output_tokens
        new = tokens - self._shared_tokens
        growth, number = max(0.0, total - self._shared_cost), new.total()
        for key, share in new.items() if number else [(IDLE, 1)]:
            self._costs[key] = self._costs.get(key, 0.0) + growth * share / (number or 1)
        self._shared_cost, self._shared_tokens = max(total, self._shared_cost), tokens
        return self._costs
