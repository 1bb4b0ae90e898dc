"""Checks of prompts and their parameters, before they reach the engine."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ingot.artifact import ModelFacts
from ingot.errors import RequestError
from ingot.runtime.asking.request_options import OptionsList, RequestOptions, checked_options
from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.forward_batch import Int64Array
from ingot.runtime.text.messages import Message

TokenIds = Sequence[int] | NDArray[np.integer]
Prompt = str | TokenIds
PromptList = list[str] | list[list[int]]
Tools = Sequence[Mapping[str, object]]
Variables = Mapping[str, object]
ParamsList = Sequence[SamplingParams]
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages to answer; `tools` are JSON schemas of functions, `variables` are passed to the chat template."""

    messages: Sequence[Message]
    tools: Tools | None = None
    variables: Variables | None = None


def is_single(prompt: Prompt | PromptList) -> bool:
    """Return whether this is one prompt, not a list of them. RequestError for an empty list, which could be either."""
    if isinstance(prompt, str):
        return True
    if not isinstance(prompt, Sequence | np.ndarray):
        raise _refusal(prompt)
    if len(prompt) == 0:
        raise RequestError("the prompt is an empty list; give a text, token ids, or a list with at least one prompt")
    return isinstance(prompt[0], Integral | float)  # a float is refused later, with a better message


def each_with_params(
    prompt: Prompt | PromptList,
    params: SamplingParams | ParamsList | None,
    options: RequestOptions | OptionsList | None = None,
) -> list[tuple[Prompt, SamplingParams, RequestOptions]]:
    """Each prompt with its parameters and options; RequestError when their numbers differ."""
    prompts: list[Prompt] = [prompt] if is_single(prompt) else list(prompt)  # type: ignore[arg-type, list-item]
    each_params = _for_each(params, SamplingParams, checked_params, len(prompts))
    each_options = _for_each(options, RequestOptions, checked_options, len(prompts))
    return list(zip(prompts, each_params, each_options, strict=True))


def checked_params(params: SamplingParams | None) -> SamplingParams:
    """The parameters, or the defaults for None; RequestError for anything else, such as a dict."""
    if params is not None and not isinstance(params, SamplingParams):
        raise RequestError(f"the parameters must be SamplingParams(...), not {_shown(params)}")
    return params or SamplingParams()


def _for_each(
    given: _Value | Sequence[_Value] | None,
    kind: type[_Value],
    checked: Callable[[_Value | None], _Value],
    num_prompts: int,
) -> list[_Value]:
    """One value for each prompt, of one for all or a list; RequestError for another number of them."""
    if not isinstance(given, Sequence) or isinstance(given, str):
        return [checked(given)] * num_prompts
    if len(given) != num_prompts:
        raise RequestError(
            f"there are {num_prompts} prompts and {len(given)} {kind.__name__}; give one for all, or one for each"
        )
    return [checked(one) for one in given]


def checked_prompt(token_ids: TokenIds, model: ModelFacts, *, room: int = 1) -> Int64Array:
    """The prompt as an array; RequestError if it is invalid or leaves fewer than `room` positions of the context."""
    _require_fits(token_ids, model.context_tokens - room, model)  # first, because it is the cheapest check
    tokens = _flat_integers(token_ids)
    if len(tokens) == 0:
        raise RequestError("the prompt has no tokens; give at least one")
    outside = np.flatnonzero((tokens < 0) | (tokens >= model.vocab_size))
    if len(outside):
        raise RequestError(
            f"token {outside[0]} of the prompt is {tokens[outside[0]]}; the model's token ids go from 0 to"
            f" {model.vocab_size - 1}: encode the text with this model's own tokenizer"
        )
    return tokens.astype(np.int64)


def _require_fits(token_ids: TokenIds, most: int, model: ModelFacts) -> None:
    if not isinstance(token_ids, Sequence | np.ndarray) or len(token_ids) <= most:
        return
    if isinstance(token_ids[0], Integral):
        raise RequestError(
            f"This model's maximum context length is {model.context_tokens} tokens, prompt and output together; the"
            f" prompt is too long, with {len(token_ids)} tokens: shorten it to at most {most}"
        )


def _flat_integers(token_ids: TokenIds) -> NDArray[np.integer]:
    try:
        tokens = np.asarray(token_ids if len(token_ids) else np.empty(0, np.int64))
    except (TypeError, ValueError):  # not a list, or lists of different lengths
        raise _refusal(token_ids) from None
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise _refusal(token_ids)
    return tokens


def _refusal(prompt: object) -> RequestError:
    return RequestError(f"the prompt must be a text or a flat list of whole token ids, not {_shown(prompt)}")


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
