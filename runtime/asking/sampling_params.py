"""`SamplingParams`: how a caller controls generation; frozen, and checked when created.

To add a parameter, add the field and its row in `_NUMBERS`, then use it in runtime/requests.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, TypeGuard

from ingot.errors import RequestError, shown
from ingot.runtime.constraints.constraint import Constraint, checked_constraint

MAX_STOP_STRINGS = 64
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGPROBS = 64
MAX_BIAS = 100
MAX_BIASED_TOKENS = 1024
MAX_SEED = 2**64 - 1
MAX_CHOICES = 128


@dataclass(frozen=True)
class SamplingParams:
    """How to sample tokens and when to stop. Raises RequestError for an invalid value.

    The order is: penalties, logit_bias, allowed_token_ids and min_tokens, temperature, top-k, top-p, min-p. All are off
    by default.

    max_tokens          most tokens to generate, at least 1
    min_tokens          until the output has so many tokens, no end token (the model's own and stop_token_ids) is
                        sampled, and stop strings are not looked for; they are found in what follows. A constraint whose
                        text is complete ends the output before.
    temperature         0 is greedy (ties go to the lowest token id); logits are divided by it otherwise
    top_k               keep the k most likely tokens; 0 keeps all
    top_p               keep the fewest most likely tokens that reach this probability (Holtzman et al., 2019)
    min_p               keep tokens at least this share as likely as the most likely one (Nguyen et al., 2024)
    seed                makes sampling reproducible; None chooses a random seed per request
    repetition_penalty  divides positive, multiplies negative logits of all tokens so far (CTRL, 2019)
    presence_penalty    is subtracted from the logits of tokens in the output
    frequency_penalty   is subtracted from a token's logit once for each time that it is in the output
    logit_bias          {token id: -100 to 100}, added to these tokens' logits; -100 bans, 100 forces in practice. It
                        is kept as pairs in order of id.
    allowed_token_ids   sample from these tokens alone, end tokens included; None: from all
    stop                a string, or several, that end the output where they first occur; they are not part of it
    stop_token_ids      tokens that end the output, in addition to the model's own end tokens
    ignore_eos          continue past the model's own end tokens
    logprobs            report the log-probability of the sampled token and of this many most likely tokens
    prompt_logprobs     report the log-probability of each token of the prompt after the first, and of this many most
                        likely tokens in its place. The prompt is computed whole: no cached prefix is used.
    n                   number of completions of the prompt, which is computed once. Choice 0 is what the request gives
                        with n = 1; the others have seeds of their own, by `choice_seed`
    best_of             sample this many choices, at least n, and return the n whose tokens have the highest mean
                        log-probability; ties go to the lower index
    skip_special_tokens special tokens give no text; False: they are part of it, unless they end the output
    keep_special_tokens special tokens that are part of the text nevertheless, by their texts
    constraint          what the text must be: `Constraint.json_schema(...)`, `regex`, `choice`, ... It applies after
                        penalties and biases; log-probabilities stay the model's own
    """

    max_tokens: int = 128
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    allowed_token_ids: Sequence[int] | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    best_of: int | None = None
    skip_special_tokens: bool = True
    keep_special_tokens: Sequence[str] = ()
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        for name, rule in _NUMBERS.items():
            rule.check(name, getattr(self, name))
        self._replace("stop", _stop_strings(self.stop))
        self._replace("stop_token_ids", _stop_token_ids(self.stop_token_ids))
        self._replace("logit_bias", _biases(self.logit_bias))
        self._replace("allowed_token_ids", _allowed_token_ids(self.allowed_token_ids))
        if self.min_tokens > self.max_tokens:
            allowed = f"at most max_tokens, which is {self.max_tokens}"
            raise _refusal("min_tokens", self.min_tokens, allowed, "lower it or allow more tokens")
        for name in ("ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise _refusal(name, getattr(self, name), "True or False", "pass a boolean")
        self._replace("keep_special_tokens", _texts(self.keep_special_tokens))
        checked_constraint(self.constraint)
        if self.num_samples < self.n:
            raise _refusal("best_of", self.best_of, f"at least n, which is {self.n}", "leave it out to return all")

    def _replace(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def changes_logits(self) -> bool:
        """Whether a penalty or a bias applies, or tokens are forbidden."""
        penalties = self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
        return penalties or bool(self.logit_bias) or self.forbids_tokens

    @property
    def forbids_tokens(self) -> bool:
        """Whether tokens are forbidden, always or at first."""
        return self.allowed_token_ids is not None or self.min_tokens > 0

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0

    @property
    def num_samples(self) -> int:
        """Choices that are sampled; n of them are returned."""
        return self.n if self.best_of is None else self.best_of

    @property
    def ranks_samples(self) -> bool:
        """Whether more choices are sampled than returned, so that their log-probabilities are needed."""
        return self.num_samples > self.n


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
        if not (self.optional and value is None) and not self.allows(value):
            raise _refusal(name, value, self.allowed, self.advice)

    def allows(self, value: object) -> bool:
        """Whether `value` is a number of the right kind and range."""
        return not isinstance(value, bool) and isinstance(value, self.kind) and self._in_range(value)

    def _in_range(self, value: Any) -> bool:
        number = int(value) if isinstance(value, Integral) else float(value)  # numpy's comparison may overflow
        return self.low <= number <= self.high and not (self.above and number == self.low)  # False for NaN


def _refusal(name: str, value: object, allowed: str, advice: str) -> RequestError:
    return RequestError(f"{name} is {shown(value)}; it must be {allowed}: {advice}", field=name)


_NUMBERS = {
    "max_tokens": _Rule(Integral, "a whole number, at least 1", "leave it out for the default", low=1),
    "min_tokens": _Rule(Integral, "a whole number, at least 0", "use 0 for no least length", low=0),
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
    "frequency_penalty": _Rule(Real, "a finite number", "use 0 for none"),
    "logprobs": _Rule(
        Integral,
        f"a whole number from 0 to {MAX_LOGPROBS}",
        "leave it out for none, use 0 for the sampled token alone",
        low=0,
        high=MAX_LOGPROBS,
        optional=True,
    ),
    "prompt_logprobs": _Rule(
        Integral,
        f"a whole number from 0 to {MAX_LOGPROBS}",
        "leave it out for none, use 0 for the prompt's tokens alone",
        low=0,
        high=MAX_LOGPROBS,
        optional=True,
    ),
    "n": _Rule(Integral, f"a whole number from 1 to {MAX_CHOICES}", "leave it out for 1", low=1, high=MAX_CHOICES),
    "best_of": _Rule(
        Integral,
        f"a whole number from 1 to {MAX_CHOICES}",
        "leave it out to return every choice",
        low=1,
        high=MAX_CHOICES,
        optional=True,
    ),
}


def _stop_strings(stop: object) -> tuple[str, ...]:
    """Stop strings as a tuple; RequestError when one is empty or not a string, or there are too many."""
    strings = (stop,) if isinstance(stop, str) else tuple(stop) if _is_list(stop) else None
    if strings is None or not all(isinstance(text, str) for text in strings):
        raise _refusal("stop", stop, "a string or a list of strings", "leave it out to stop at end tokens only")
    if "" in strings:
        raise _refusal("stop", stop, "made of strings with at least one character", "take out the empty one")
    if len(strings) > MAX_STOP_STRINGS:
        found = f"{len(strings)} strings"
        raise _refusal("stop", found, f"at most {MAX_STOP_STRINGS}", "keep the shortest")
    return strings


def _texts(texts: object) -> tuple[str, ...]:
    """Special tokens to keep, as a tuple; RequestError for other things than a list of texts."""
    if not _is_list(texts) or not all(isinstance(text, str) for text in texts) or len(texts) > MAX_STOP_STRINGS:
        allowed = f"a list of at most {MAX_STOP_STRINGS} texts"
        raise _refusal("keep_special_tokens", texts, allowed, "leave it out to show no special token")
    return tuple(texts)


def _token_ids(name: str, token_ids: object) -> tuple[int, ...]:
    """Token ids as a tuple; RequestError for other things. The vocabulary is unknown here."""
    whole = "a list of token ids, whole numbers of at least 0"
    if not _is_list(token_ids):
        raise _refusal(name, token_ids, whole, "write [2] for a single one")
    for token_id in token_ids:
        if not _is_token_id(token_id):
            raise _refusal(name, token_ids, whole, f"take out {shown(token_id)}")
    return tuple(token_ids)


def _allowed_token_ids(token_ids: object) -> tuple[int, ...] | None:
    """Allowed tokens as a tuple in order of id; None: all. RequestError for none, or for other than token ids."""
    if token_ids is None:
        return None
    ids = _token_ids("allowed_token_ids", token_ids)
    if not ids:
        raise _refusal("allowed_token_ids", [], "at least one token id", "leave it out to allow all")
    return tuple(sorted({int(token_id) for token_id in ids}))


def _stop_token_ids(token_ids: object) -> tuple[int, ...]:
    """Stop tokens as a tuple; RequestError for other things than token ids, and for too many."""
    ids = _token_ids("stop_token_ids", token_ids)
    if len(ids) > MAX_STOP_TOKEN_IDS:
        found = f"{len(ids)} token ids"
        raise _refusal("stop_token_ids", found, f"at most {MAX_STOP_TOKEN_IDS}", "keep the most likely ones")
    return ids


def _biases(biases: object) -> tuple[tuple[int, float], ...]:
    """Biases as pairs in order of id; RequestError for other things than token ids and numbers from -100 to 100."""
    allowed = f"a mapping of token ids to numbers from {-MAX_BIAS} to {MAX_BIAS}"
    items = biases.items() if isinstance(biases, Mapping) else biases
    if isinstance(items, str) or not isinstance(items, Iterable):
        raise _refusal("logit_bias", biases, allowed, "write {token_id: -100} to ban a token")
    pairs = []
    for item in items:
        if not (_is_list(item) and len(item) == 2 and _is_token_id(item[0]) and _BIAS.allows(item[1])):
            raise _refusal("logit_bias", biases, allowed, f"correct {shown(item)}")
        pairs.append((int(item[0]), float(item[1])))
    if len(dict(pairs)) < len(pairs):
        raise _refusal("logit_bias", biases, "one bias for each token", "take out those that are repeated")
    if len(pairs) > MAX_BIASED_TOKENS:
        found = f"{len(pairs)} biases"
        raise _refusal("logit_bias", found, f"at most {MAX_BIASED_TOKENS}", "keep the largest")
    return tuple(sorted(pairs))


_BIAS = _Rule(Real, "", "", low=-MAX_BIAS, high=MAX_BIAS)


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def _is_token_id(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0
