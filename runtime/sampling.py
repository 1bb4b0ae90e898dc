"""`SamplingParams`: how a caller controls generation; frozen, and checked when created.

To add a parameter, add the field and its row in `_NUMBERS`, then use it in `sampler.py` or `request.py`.
"""

import sys
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from ingot.errors import RequestError

MAX_STOP_STRINGS = 64
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGPROBS = 64
MAX_SEED = 2**64 - 1


@dataclass(frozen=True)
class SamplingParams:
    """How to sample tokens and when to stop. Raises RequestError for an invalid value.

    The order is: penalties, temperature, top-k, top-p, min-p (as in transformers). All are off by default.

    max_tokens          most tokens to generate, at least 1
    temperature         0 is greedy (ties go to the lowest token id); logits are divided by it otherwise
    top_k               keep the k most likely tokens; 0 keeps all
    top_p               keep the fewest most likely tokens that reach this probability (Holtzman et al., 2019)
    min_p               keep tokens at least this share as likely as the most likely one (Nguyen et al., 2024)
    seed                makes sampling reproducible; None chooses a random seed per request
    repetition_penalty  divides positive, multiplies negative logits of all tokens so far (CTRL, 2019)
    presence_penalty    is subtracted from the logits of tokens in the output
    stop                strings that end the output where they first occur; they are not part of it
    stop_token_ids      tokens that end the output, in addition to the model's own end tokens
    ignore_eos          continue past the model's own end tokens
    logprobs            report the log-probability of the sampled token and of this many most likely tokens
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        for name, rule in _NUMBERS.items():
            rule.check(name, getattr(self, name))
        _check_stop(self.stop)
        _check_stop_token_ids(self.stop_token_ids)
        if not isinstance(self.ignore_eos, bool):
            raise _refusal("ignore_eos", self.ignore_eos, "True or False", "pass a boolean")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0


@dataclass(frozen=True)
class _Rule:
    """Allowed values of a number, as a test and in words; both ends are allowed unless `above` is set."""

    kind: type[Integral] | type[Real]
    allowed: str
    advice: str
    low: float = -sys.float_info.max
    high: float = sys.float_info.max
    above: bool = False  # `low` itself is refused
    optional: bool = False

    def check(self, name: str, value: object) -> None:
        """Raise RequestError unless `value` is a number of the right kind and range."""
        if value is None and self.optional:
            return
        if isinstance(value, bool) or not isinstance(value, self.kind) or not self._in_range(value):
            raise _refusal(name, value, self.allowed, self.advice)

    def _in_range(self, value: Any) -> bool:
        number = int(value) if isinstance(value, Integral) else float(value)  # numpy's comparison may overflow
        return self.low <= number <= self.high and not (self.above and number == self.low)  # False for NaN


def _refusal(name: str, value: object, allowed: str, advice: str) -> RequestError:
    return RequestError(f"{name} is {value!r}; it must be {allowed}: {advice}")


_NUMBERS = {
    "max_tokens": _Rule(Integral, "a whole number, at least 1", "leave it out for 128", low=1),
    "temperature": _Rule(Real, "a finite number, at least 0", "use 0 for greedy, 0.7 for variety", low=0),
    "top_k": _Rule(Integral, "a whole number, at least 0", "use 0 to keep all tokens", low=0),
    "top_p": _Rule(Real, "above 0 and at most 1", "use 1 to keep all tokens", low=0, high=1, above=True),
    "min_p": _Rule(Real, "from 0 to 1", "use 0 to keep all tokens", low=0, high=1),
    "seed": _Rule(
        Integral,
        f"a whole number from 0 to {MAX_SEED}",
        "leave it out for a random one",
        low=0,
        high=MAX_SEED,
        optional=True,
    ),
    "repetition_penalty": _Rule(Real, "a finite number above 0", "use 1 for none", low=0, above=True),
    "presence_penalty": _Rule(Real, "a finite number", "use 0 for none"),
    "logprobs": _Rule(
        Integral,
        f"a whole number from 0 to {MAX_LOGPROBS}",
        "leave it out for none, use 0 for the sampled token alone",
        low=0,
        high=MAX_LOGPROBS,
        optional=True,
    ),
}


def _check_stop(stop: object) -> None:
    """Check that stop strings are a tuple of non-empty strings, and not too many."""
    advice = "leave it out to stop at the model's own end tokens only"
    if not isinstance(stop, tuple) or not all(isinstance(text, str) for text in stop):
        raise _refusal("stop", stop, "a tuple of strings", 'write ("END",) for a single one')
    if "" in stop:
        raise _refusal("stop", stop, "made of strings with at least one character", advice)
    if len(stop) > MAX_STOP_STRINGS:
        found = f"{len(stop)} strings"
        raise _refusal("stop", found, f"at most {MAX_STOP_STRINGS}", "keep the shortest")


def _check_stop_token_ids(token_ids: object) -> None:
    """Check that stop tokens are a tuple of token ids, and not too many. The vocabulary is unknown here."""
    whole = "a tuple of token ids, whole numbers of at least 0"
    if not isinstance(token_ids, tuple):
        raise _refusal("stop_token_ids", token_ids, whole, "write (2,) for a single one")
    for token_id in token_ids:
        if isinstance(token_id, bool) or not isinstance(token_id, Integral) or token_id < 0:
            raise _refusal("stop_token_ids", token_ids, whole, f"take out {token_id!r}")
    if len(token_ids) > MAX_STOP_TOKEN_IDS:
        found = f"{len(token_ids)} token ids"
        raise _refusal("stop_token_ids", found, f"at most {MAX_STOP_TOKEN_IDS}", "keep the most likely ones")
