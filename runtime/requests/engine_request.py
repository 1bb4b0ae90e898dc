"""`EngineRequest`: what is asked of an engine, as one value that is carried whole from the edge to the sequences."""

from dataclasses import dataclass, replace

import numpy as np

from ingot.errors import RequestError
from ingot.runtime.asking.prompts import ChatPrompt, Prompt, checked_params
from ingot.runtime.asking.request_options import RequestOptions, checked_options
from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.forward_batch import Int64Array
from ingot.runtime.requests.beam_search import BeamParams

GenerationParams = SamplingParams | BeamParams


@dataclass(frozen=True, eq=False, slots=True)
class EngineRequest:
    """A request for one prompt, by sampling or by beam search. Raises RequestError for values that exclude each other.

    prompt            a text, a conversation or token ids; an array once it is encoded and checked
    keep_logits       add the logits of every generated token to the completion
    arrival_seconds   by the engine's clock; None: when the engine gets it
    """

    prompt: Prompt | ChatPrompt
    params: GenerationParams
    options: RequestOptions
    keep_logits: bool = False
    arrival_seconds: float | None = None

    def __post_init__(self) -> None:
        if self.keep_logits and isinstance(self.params, BeamParams):
            raise RequestError(
                "keep_logits is set, but a beam search does not keep logits: those of its beams, most of which it"
                " gives up, would be kept too; for the logits of one sequence, use SamplingParams"
            )

    @classmethod
    def of(
        cls,
        prompt: Prompt | ChatPrompt,
        params: GenerationParams | None = None,
        options: RequestOptions | None = None,
        keep_logits: bool = False,
        arrival_seconds: float | None = None,
    ) -> "EngineRequest":
        """Return the request of a caller, with the defaults for None. RequestError for values of another type."""
        params = params if isinstance(params, BeamParams) else checked_params(params)
        return cls(prompt, params, checked_options(options), keep_logits, arrival_seconds)

    def encoded(self, tokens: Int64Array) -> "EngineRequest":
        """Return the same request for the tokens of its prompt."""
        return replace(self, prompt=tokens)

    def arrived(self, now: float) -> "EngineRequest":
        """Return the same request with this time of arrival, unless it has one."""
        return self if self.arrival_seconds is not None else replace(self, arrival_seconds=now)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt, once it is encoded."""
        assert not isinstance(self.prompt, str | ChatPrompt), "the prompt is not encoded"
        return len(self.prompt)

    @property
    def token_ids(self) -> Int64Array:
        """The prompt, once it is encoded and checked."""
        assert isinstance(self.prompt, np.ndarray), "the prompt is not encoded"
        return self.prompt.astype(np.int64, copy=False)
