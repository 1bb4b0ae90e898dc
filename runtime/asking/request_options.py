"""`RequestOptions`: how the engine serves a request. `adapter` alone changes tokens; the rest are `SamplingParams`."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

from ingot.errors import RequestError, shown
from ingot.options import Doc, Range, Reader, check_options, documented

MAX_SALT_CHARS = 1024
MAX_GROUP_CHARS = 256
MAX_PRIORITY = 2**31 - 1


def _text(most: float = math.inf) -> Callable[[object], str]:
    def read(value: object) -> str:
        if not isinstance(value, str) or len(value) > most:
            raise ValueError
        return value

    return read


@documented
@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """Options of one request. Raises RequestError for an invalid value."""

    cache_salt: Annotated[
        str,
        Reader(_text(MAX_SALT_CHARS), f"a text of at most {MAX_SALT_CHARS} characters"),
        Doc(
            "requests share cached blocks only with requests of the same salt: one per tenant keeps the prompts of"
            " others from being found out by timing"
        ),
    ] = ""
    prefix_cache: Annotated[bool, Doc("use cached blocks, and leave some; False: neither")] = True
    priority: Annotated[
        int,
        Range(ge=-MAX_PRIORITY, le=MAX_PRIORITY, advice="leave it out for 0, lower numbers are served first"),
        Doc("lower numbers are served first, and preempt others if they must; waiting makes a request more urgent"),
    ] = 0
    group: Annotated[
        str,
        Reader(_text(MAX_GROUP_CHARS), f"a text of at most {MAX_GROUP_CHARS} characters"),
        Doc("a user or tenant: groups of one priority share the engine by tokens, however many requests they make"),
    ] = ""
    timeout_seconds: Annotated[
        float | None,
        Range(gt=0, words="a finite number above 0, or None for no limit"),
        Doc(
            "from the arrival; a request that takes longer ends with the reason timeout and its output so far. Checked"
            " before every step",
            none="no limit",
        ),
    ] = None
    speculate: Annotated[bool, Doc("verify drafts for this request, in an engine that speculates")] = True
    adapter: Annotated[
        str | None,
        Reader(_text(), "the name of an adapter, or None for none"),
        Doc("name of a LoRA adapter that the engine has loaded", none="the model as it is"),
    ] = None

    def __post_init__(self) -> None:
        check_options(self, refuse=lambda message, name: RequestError(message, field=name))


OptionsList = Sequence[RequestOptions]


def checked_options(options: RequestOptions | None) -> RequestOptions:
    """The options, or the defaults for None; RequestError for anything else, such as a dict."""
    if options is not None and not isinstance(options, RequestOptions):
        raise RequestError(f"the options must be RequestOptions(...), not {shown(options)}")
    return options or RequestOptions()
