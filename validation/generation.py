"""Compares greedy generations of candidate and baseline, token by token.

A difference that a single prediction hardly shows, such as that of a rounded KV cache, adds up over hundreds of tokens
that each depend on all before them. Both continue the same prompts, pieces of the evaluation text at equal distances,
and ignore the end of text. Intervals are over prompts. docs/evidence.md defines the metrics.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ingot.errors import UsageError
from ingot.progress import Stage
from ingot.validation.options import GenerationOptions
from ingot.validation.statistics import Measured, mean_interval, proportion_interval
from ingot.validation.subject import GreedySubject
from ingot.validation.windows import EvaluationText


@dataclass(frozen=True)
class GenerationItem:
    """One prompt: where it starts in the text, tokens equal at the same place, tokens before the first difference."""

    start: int
    tokens: int
    agreements: int
    common_tokens: int


@dataclass(frozen=True)
class GenerationResult:
    """All prompts in text order. `options` are as fitted to the context."""

    options: GenerationOptions
    items: tuple[GenerationItem, ...]


def measure_generations(
    candidate: GreedySubject, baseline: GreedySubject, text: EvaluationText, options: GenerationOptions
) -> GenerationResult:
    """Continue the prompts by both. Raises UsageError for a text that is shorter than a prompt."""
    fitted = options.fitted(min(candidate.context_tokens, baseline.context_tokens))
    starts = _starts(text, fitted)
    stage = Stage("generations", 2)
    outputs = []
    for subject in (candidate, baseline):
        outputs.append(
            subject.continue_greedily([_prompt(text, start, fitted) for start in starts], fitted.output_tokens)
        )
        stage.advance()
    return GenerationResult(fitted, tuple(map(_item, starts, *outputs)))


def generation_metrics(result: GenerationResult) -> list[Measured]:
    """The metrics greedy_agreement and greedy_common_tokens, with intervals over prompts."""
    tokens = [item.tokens for item in result.items]
    estimates = {
        "greedy_agreement": proportion_interval([item.agreements for item in result.items], tokens),
        "greedy_common_tokens": mean_interval([item.common_tokens for item in result.items]),
    }
    return [
        Measured(name, estimate, sample_unit="generated tokens", sample_size=sum(tokens))
        for name, estimate in estimates.items()
    ]


def _starts(text: EvaluationText, options: GenerationOptions) -> list[int]:
    """First tokens of the prompts."""
    last = len(text.token_ids) - options.prompt_tokens
    if last < 0:
        raise UsageError(
            f"{text.name}: the text has {len(text.token_ids)} tokens, less than a prompt of {options.prompt_tokens}; "
            "give a longer text, or set evaluation generations to 0"
        )
    return [int(start) for start in np.linspace(0, last, options.prompts)]


def _prompt(text: EvaluationText, start: int, options: GenerationOptions) -> list[int]:
    """The piece from `start` on; the BOS token, if there is one, replaces its first token."""
    piece = list(text.token_ids[start : start + options.prompt_tokens])
    return piece if text.bos_token_id is None else [text.bos_token_id, *piece[1:]]


def _item(start: int, candidate: Sequence[int], baseline: Sequence[int]) -> GenerationItem:
    assert len(candidate) == len(baseline), (len(candidate), len(baseline))
    equal = np.asarray(candidate) == np.asarray(baseline)
    common = len(equal) if equal.all() else int(equal.argmin())
    return GenerationItem(start, len(equal), int(equal.sum()), common)
