"""Greedy generations: prompts, agreement by place and up to the first difference, intervals, refusals."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from ingot.errors import UsageError
from ingot.validation.generation import GenerationItem, generation_metrics, measure_generations
from ingot.validation.options import GenerationOptions
from ingot.validation.windows import EvaluationText

TEXT = EvaluationText("text.txt", "0" * 64, tuple(range(100)))


@dataclass
class CountingSubject:
    """Continues a prompt by counting on from its last token; from place `wrong_from` on it skips one number."""

    wrong_from: int | None = None
    context_tokens: int = 1000
    prompts: list[list[int]] = field(default_factory=list)

    def continue_greedily(self, prompts: Sequence[Sequence[int]], output_tokens: int) -> list[list[int]]:
        """The numbers that follow."""
        self.prompts += [list(prompt) for prompt in prompts]
        late = output_tokens if self.wrong_from is None else self.wrong_from
        return [[prompt[-1] + 1 + i + (i >= late) for i in range(output_tokens)] for prompt in prompts]


def test_equal_subjects_agree_on_every_token() -> None:
    result = measure_generations(CountingSubject(), CountingSubject(), TEXT, GenerationOptions(3, 10, 8))
    assert result.items == tuple(GenerationItem(start, 8, 8, 8) for start in (0, 45, 90))
    agreement, common = generation_metrics(result)
    assert (agreement.estimate.value, agreement.sample_size) == (1.0, 24)
    assert agreement.estimate.low < 1.0, "three prompts prove little"
    assert common.estimate.value == 8


def test_tokens_are_compared_by_place_and_up_to_the_first_difference() -> None:
    result = measure_generations(CountingSubject(wrong_from=5), CountingSubject(), TEXT, GenerationOptions(2, 10, 8))
    assert {(item.agreements, item.common_tokens) for item in result.items} == {(5, 5)}
    assert [one.estimate.value for one in generation_metrics(result)] == [5 / 8, 5]


def test_prompts_are_pieces_of_the_text_and_begin_with_a_bos_token_if_there_is_one() -> None:
    subject = CountingSubject()
    measure_generations(subject, CountingSubject(), TEXT, GenerationOptions(2, 3, 4))
    opened = EvaluationText("text.txt", "0" * 64, TEXT.token_ids, bos_token_id=7)
    measure_generations(subject, CountingSubject(), opened, GenerationOptions(2, 3, 4))
    assert subject.prompts == [[0, 1, 2], [97, 98, 99], [7, 1, 2], [7, 98, 99]]


def test_too_little_text_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"text.txt: the text has 100 tokens, less than a prompt of 101; give a longer"
    ):
        measure_generations(CountingSubject(), CountingSubject(), TEXT, GenerationOptions(2, 101, 1))
