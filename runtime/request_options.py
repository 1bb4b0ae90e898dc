"""`RequestOptions`: how the engine serves a request. None of them changes its tokens; those are `SamplingParams`."""

from collections.abc import Sequence
from dataclasses import dataclass

from ingot.errors import RequestError, shown

MAX_SALT_CHARS = 1024


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """Options of one request. Raises RequestError for an invalid value.

    cache_salt     requests share cached blocks only with requests of the same salt: one per tenant keeps the prompts
                   of others from being found out by timing
    prefix_cache   False: use no cached blocks, and leave none
    """

    cache_salt: str = ""
    prefix_cache: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.cache_salt, str) or len(self.cache_salt) > MAX_SALT_CHARS:
            raise RequestError(
                f"cache_salt is {shown(self.cache_salt)}; it must be a text of at most {MAX_SALT_CHARS} characters"
            )
        if not isinstance(self.prefix_cache, bool):
            raise RequestError(f"prefix_cache is {shown(self.prefix_cache)}; it must be True or False")


OptionsList = Sequence[RequestOptions]


def checked_options(options: RequestOptions | None) -> RequestOptions:
    """The options, or the defaults for None; RequestError for anything else, such as a dict."""
    if options is not None and not isinstance(options, RequestOptions):
        raise RequestError(f"the options must be RequestOptions(...), not {shown(options)}")
    return options or RequestOptions()
