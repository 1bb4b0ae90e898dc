"""`RequestOptions`: how the engine serves a request. `adapter` alone changes tokens; the rest are `SamplingParams`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real

from ingot.errors import RequestError, shown

MAX_SALT_CHARS = 1024
MAX_GROUP_CHARS = 256
MAX_PRIORITY = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """Options of one request. Raises RequestError for an invalid value.

    cache_salt     requests share cached blocks only with requests of the same salt: one per tenant keeps the prompts
                   of others from being found out by timing
    prefix_cache   False: use no cached blocks, and leave none
    priority       lower numbers are served first, and preempt others if they must; waiting makes a request more urgent
    group          a user or tenant: groups of one priority share the engine by tokens, however many requests they make
    timeout_seconds
                   from the arrival; a request that takes longer ends with the reason "timeout" and its output so far.
                   Checked before every step. None: no limit
    speculate      False: verify no drafts for this request, in an engine that speculates
    adapter        name of a LoRA adapter that the engine has loaded; None: the model as it is
    """

    cache_salt: str = ""
    prefix_cache: bool = True
    priority: int = 0
    group: str = ""
    timeout_seconds: float | None = None
    speculate: bool = True
    adapter: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.cache_salt, str) or len(self.cache_salt) > MAX_SALT_CHARS:
            raise RequestError(
                f"cache_salt is {shown(self.cache_salt)}; it must be a text of at most {MAX_SALT_CHARS} characters",
                field="cache_salt",
            )
        if self.adapter is not None and not isinstance(self.adapter, str):
            raise RequestError(
                f"adapter is {shown(self.adapter)}; it must be the name of an adapter, or None for none",
                field="adapter",
            )
        for name in ("prefix_cache", "speculate"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} is {shown(getattr(self, name))}; it must be True or False", field=name)
        if not _is_integer(self.priority) or abs(self.priority) > MAX_PRIORITY:
            raise RequestError(
                f"priority is {shown(self.priority)}; it must be a whole number from {-MAX_PRIORITY} to {MAX_PRIORITY}:"
                " leave it out for 0, lower numbers are served first",
                field="priority",
            )
        if not isinstance(self.group, str) or len(self.group) > MAX_GROUP_CHARS:
            raise RequestError(
                f"group is {shown(self.group)}; it must be a text of at most {MAX_GROUP_CHARS} characters",
                field="group",
            )
        if self.timeout_seconds is not None and not _is_positive(self.timeout_seconds):
            raise RequestError(
                f"timeout_seconds is {shown(self.timeout_seconds)}; it must be a finite number above 0, or None for no"
                " limit",
                field="timeout_seconds",
            )


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_positive(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and 0 < float(value) < math.inf


OptionsList = Sequence[RequestOptions]


def checked_options(options: RequestOptions | None) -> RequestOptions:
    """The options, or the defaults for None; RequestError for anything else, such as a dict."""
    if options is not None and not isinstance(options, RequestOptions):
        raise RequestError(f"the options must be RequestOptions(...), not {shown(options)}")
    return options or RequestOptions()
