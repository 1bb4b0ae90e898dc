"""Lengths of the requests: one goes beyond windows, attention's splits and steps where the context allows it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ingot.runtime.options import EngineOptions
from ingot.validation.verify.plan import Plan
from ingot.validation.verify.requests import Lengths, drafts_before_drafts, make_requests
from ingot.validation.verify.subject import Subject
from tests.each_case import each_case
from tests.validation.verify.subjects import fake_subject

TOKENS = np.random.default_rng(1).integers(1, 4000, 900).tolist()


@pytest.fixture(name="subject")
def subject_of_8_token_blocks(tmp_path: Path) -> Subject:
    return replace(fake_subject(tmp_path), raises_batch_tokens=True)


def with_sizes(subject: Subject, context: int, window: int) -> Subject:
    model = subject.model.model_copy(update={"context_tokens": context})
    return replace(subject, model=model, kv=subject.kv.model_copy(update={"window": window}))


@each_case(
    ("context", "window", "quick", "large"),
    [
        (1024, 0, True, 512 + 19),  # two blocks and three tokens past a split
        (1024, 128, True, 512 + 19),
        (4096, 2048, False, 2048 + 19),
        (4096, 2048, True, 512 + 19),  # past the window would be too long for the quick form
        (2048, 2048, False, 512 + 19),
        (512, 0, False, 0),
    ],
)
def test_the_large_prompt_is_past_the_window_or_a_split(context: int, window: int, quick: bool, large: int) -> None:
    subject = with_sizes(replace(fake_subject(Path()), raises_batch_tokens=True), context, window)
    assert Lengths.of(subject, quick).large == large


def test_a_step_that_cannot_be_raised_holds_no_large_prompt(subject: Subject) -> None:
    subject = with_sizes(subject, 1024, 0)
    assert Lengths.of(replace(subject, raises_batch_tokens=False), quick=True).large == 0
    most = replace(subject, raises_batch_tokens=False, max_batch_tokens=600)
    assert Lengths.of(most, quick=True).large == 512 + 19


def test_the_large_request_is_the_last_and_changes_no_other(subject: Subject) -> None:
    lengths = Lengths.of(with_sizes(subject, 1024, 0), quick=True)
    requests = make_requests(TOKENS, lengths, seed=0, quick=True)
    assert requests[:-1] == make_requests(TOKENS, replace(lengths, large=0), seed=0, quick=True)
    assert (requests[-1].name, len(requests[-1].prompt)) == ("large", lengths.large)
    assert [one.is_large for one in requests] == [False] * (len(requests) - 1) + [True]
    short = make_requests(TOKENS[:400], lengths, seed=0, quick=True)
    assert len(short[-1].prompt) == lengths.large, "a text that is shorter is repeated"


def test_a_large_request_runs_in_an_ample_pool_and_not_in_small_steps_with_others(subject: Subject) -> None:
    requests = make_requests(TOKENS, Lengths.of(with_sizes(subject, 1024, 0), quick=True), seed=0, quick=True)
    small_steps = EngineOptions(max_batch_tokens=18)
    for plan in (Plan(), Plan(together=True), Plan(options=small_steps)):
        assert all(plan.has(one) for one in requests)
    for plan in (Plan(pool="tight"), Plan(pool="minimal"), Plan(together=True, options=small_steps)):
        assert [one.name for one in requests if not plan.has(one)] == ["large"]


def test_places_of_accepted_drafts_that_are_not_the_last_of_their_step() -> None:
    prompt = [9, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    # After 1 follow 2, 3, 4 and 5, the last of its step; the step after it has one draft, 7.
    assert [*drafts_before_drafts(prompt, [1, 2, 3, 4, 5, 6, 7, 8])] == [1, 2, 3]
    assert [*drafts_before_drafts(prompt, [1, 2, 3, 1, 5, 6, 7, 8])] == [1, 2]
    assert [*drafts_before_drafts([1, 2, 3], [4, 5, 6, 7])] == []
