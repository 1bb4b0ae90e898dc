"""`SamplingParams`: how a caller controls generation; frozen, and checked when created.

To add a parameter, declare it here, then use it in runtime/requests.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Annotated, Any, TypeGuard

from ingot.errors import RequestError, shown
from ingot.options import Doc, Range, Reader, check_options, documented
from ingot.runtime.constraints.constraint import Constraint, checked_constraint

MAX_STOP_STRINGS = 64
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGPROBS = 64
MAX_BIAS = 100
MAX_BIASED_TOKENS = 1024
MAX_SEED = 2**64 - 1
MAX_CHOICES = 128
_ANY_FINITE = Range(ge=-sys.float_info.max, words="a finite number", advice="use 0 for none")


def _refusal(name: str, value: object, allowed: str, advice: str) -> RequestError:
    return RequestError(f"{name} is {shown(value)}; it must be {allowed}: {advice}", field=name)


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


def _allowed_token_ids(token_ids: object) -> tuple[int, ...]:
    """Allowed tokens as a tuple in order of id; RequestError for none, or for other than token ids."""
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
        if not (_is_list(item) and len(item) == 2 and _is_token_id(item[0]) and _is_bias(item[1])):
            raise _refusal("logit_bias", biases, allowed, f"correct {shown(item)}")
        pairs.append((int(item[0]), float(item[1])))
    if len(dict(pairs)) < len(pairs):
        raise _refusal("logit_bias", biases, "one bias for each token", "take out those that are repeated")
    if len(pairs) > MAX_BIASED_TOKENS:
        found = f"{len(pairs)} biases"
        raise _refusal("logit_bias", found, f"at most {MAX_BIASED_TOKENS}", "keep the largest")
    return tuple(sorted(pairs))


def _is_bias(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    return abs(int(value) if isinstance(value, Integral) else float(value)) <= MAX_BIAS


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def _is_token_id(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0


def _boolean(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


_SWITCH = Reader(_boolean, "True or False: pass a boolean")


@documented
@dataclass(frozen=True)
class SamplingParams:
    """How to sample tokens and when to stop. Raises RequestError for an invalid value.

    The order is: penalties, logit_bias, allowed_token_ids and min_tokens, temperature, top-k, top-p, min-p. All are off
    by default.
    """

    max_tokens: Annotated[int, Range(ge=1, advice="leave it out for the default"), Doc("most tokens to generate")] = 128
    min_tokens: Annotated[
        int,
        Range(ge=0, advice="use 0 for no least length"),
        Doc(
            "until the output has so many tokens, no end token is sampled and stop strings are not looked"
            " for; they are found in what follows. A constraint whose text is complete ends the output before"
        ),
    ] = 0
    temperature: Annotated[
        float,
        Range(ge=0, words="a finite number, at least 0", advice="use 0 for greedy, 0.7 for variety"),
        Doc("divide logits by this; 0 is greedy, where ties go to the lowest token id"),
    ] = 0.0
    top_k: Annotated[
        int,
        Range(ge=0, advice="use 0 to keep all tokens"),
        Doc("keep the k most likely tokens; 0 keeps all"),
    ] = 0
    top_p: Annotated[
        float,
        Range(gt=0, le=1, words="above 0 and at most 1", advice="use 1 to keep all tokens"),
        Doc("keep the fewest most likely tokens that reach this probability (Holtzman et al., 2019)"),
    ] = 1.0
    min_p: Annotated[
        float,
        Range(ge=0, le=1, words="from 0 to 1", advice="use 0 to keep all tokens"),
        Doc("keep tokens at least this share as likely as the most likely one (Nguyen et al., 2024)"),
    ] = 0.0
    seed: Annotated[
        int | None,
        Range(ge=0, le=MAX_SEED, advice="leave it out for a random one"),
        Doc("same seed, same text", none="a random one"),
    ] = None
    repetition_penalty: Annotated[
        float,
        Range(gt=0, advice="use 1 for none"),
        Doc("divide positive, multiply negative logits of all tokens so far by this (CTRL, 2019)"),
    ] = 1.0
    presence_penalty: Annotated[float, _ANY_FINITE, Doc("subtract this from the logits of tokens in the output")] = 0.0
    frequency_penalty: Annotated[
        float,
        _ANY_FINITE,
        Doc("subtract this from a token's logit once for each time that it is in the output"),
    ] = 0.0
    logit_bias: Annotated[
        Mapping[int, float] | tuple[tuple[int, float], ...],
        Reader(_biases),
        Doc(
            "{token id: -100 to 100}, added to these tokens' logits; -100 bans, 100 forces in practice. It is"
            " kept as pairs in order of id"
        ),
    ] = ()
    allowed_token_ids: Annotated[
        Sequence[int] | None,
        Reader(_allowed_token_ids),
        Doc("sample from these tokens alone, end tokens included", none="all"),
    ] = None
    stop: Annotated[
        str | Sequence[str],
        Reader(_stop_strings),
        Doc("end the output where this text first occurs; it is not part of it"),
    ] = ()
    stop_token_ids: Annotated[
        Sequence[int],
        Reader(_stop_token_ids),
        Doc("tokens that end the output, in addition to the model's own end tokens"),
    ] = ()
    ignore_eos: Annotated[bool, _SWITCH, Doc("continue past the model's own end tokens")] = False
    logprobs: Annotated[
        int | None,
        Range(
            ge=0,
            le=MAX_LOGPROBS,
            advice="leave it out for none, use 0 for the sampled token alone",
        ),
        Doc("report the log-probability of the sampled token and of this many most likely tokens"),
    ] = None
    prompt_logprobs: Annotated[
        int | None,
        Range(
            ge=0,
            le=MAX_LOGPROBS,
            advice="leave it out for none, use 0 for the prompt's tokens alone",
        ),
        Doc(
            "report the log-probability of each token of the prompt after the first, and of this many most"
            " likely tokens in its place. The prompt is computed whole: no cached prefix is used"
        ),
    ] = None
    n: Annotated[
        int,
        Range(ge=1, le=MAX_CHOICES, advice="leave it out for 1"),
        Doc(
            "number of completions of the prompt, which is computed once. Choice 0 is what the request gives"
            " with n = 1; the others have seeds of their own"
        ),
    ] = 1
    best_of: Annotated[
        int | None,
        Range(ge=1, le=MAX_CHOICES, advice="leave it out to return every choice"),
        Doc(
            "sample this many choices, at least n, and return the n whose tokens have the highest mean"
            " log-probability; ties go to the lower index",
            none="n",
        ),
    ] = None
    skip_special_tokens: Annotated[
        bool,
        _SWITCH,
        Doc("special tokens give no text; false: they are part of it, unless they end the output"),
    ] = True
    keep_special_tokens: Annotated[
        Sequence[str],
        Reader(_texts),
        Doc("special tokens that are part of the text nevertheless, by their texts"),
    ] = ()
    constraint: Annotated[
        Constraint | None,
        Reader(checked_constraint),
        Doc(
            "what the text must be, a Constraint; it applies after penalties and biases, and"
            " log-probabilities stay the model's own"
        ),
    ] = None

    def __post_init__(self) -> None:
        check_options(self, refuse=lambda message, name: RequestError(message, field=name))
        if self.min_tokens > self.max_tokens:
            allowed = f"at most max_tokens, which is {self.max_tokens}"
            raise _refusal("min_tokens", self.min_tokens, allowed, "lower it or allow more tokens")
        if self.num_samples < self.n:
            raise _refusal("best_of", self.best_of, f"at least n, which is {self.n}", "leave it out to return all")

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
