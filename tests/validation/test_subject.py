"""The engine as a subject: logits of whole prompts, and requests of a fixed length."""

import numpy as np
import pytest

from ingot.errors import DataError
from ingot.runtime.engine.engine import Engine
from ingot.validation.accuracy import measure_accuracy
from ingot.validation.latency.measurement import measure_latency
from ingot.validation.options import AccuracyOptions, LatencyLoad
from ingot.validation.subject import EngineSubject, StepEvent
from ingot.validation.windows import EvaluationText
from tests.simulators.fake_executor import FakeExecutor


def _subject(max_batch_tokens: int = 16) -> EngineSubject:
    return EngineSubject(Engine(FakeExecutor(max_batch_tokens=max_batch_tokens), prefix_cache=False))


def test_chunks_of_prompt_logits_add_up_to_the_whole_prompt() -> None:
    prompt = list(range(40))
    with _subject(16) as small, _subject(64) as large:
        chunks = [chunk.copy() for chunk in small.prompt_logits(prompt)]
        [whole] = [chunk.copy() for chunk in large.prompt_logits(prompt)]
    assert [len(chunk) for chunk in chunks] == [16, 16, 8]
    assert np.array_equal(np.concatenate(chunks), whole)


def test_every_prompt_starts_from_an_empty_context() -> None:
    with _subject() as subject:
        first = np.concatenate([chunk.copy() for chunk in subject.prompt_logits([5, 6, 7])])
        list(subject.prompt_logits(list(range(100))))
        again = np.concatenate([chunk.copy() for chunk in subject.prompt_logits([5, 6, 7])])
    assert np.array_equal(first, again)


def test_a_request_generates_exactly_its_output_tokens() -> None:
    with _subject() as subject:
        request = subject.submit([1, 2, 3], output_tokens=5)
        events: list[StepEvent] = []
        while not events or not events[-1].finished:
            events += subject.step()
    assert {event.request for event in events} == {request}
    assert sum(event.new_tokens for event in events) == 5


def test_both_measurements_run_on_the_real_engine() -> None:
    text = EvaluationText("text.txt", "0" * 64, tuple(range(200)))
    with _subject() as candidate, _subject() as baseline:
        accuracy = measure_accuracy(candidate, baseline, text, AccuracyOptions(tokens=120, window_tokens=40))
        options = LatencyLoad(concurrency=(1, 3), prompt_tokens=20, output_tokens=4, requests=3, rounds=2)
        latency = measure_latency(candidate, baseline, options)
    assert [item.agreements for item in accuracy.items] == [40, 40, 40]
    assert accuracy.token_kl.max() == 0.0
    assert {len(request.token_seconds) for run in latency.runs for request in run.requests} == {4}
    assert all(request.ttft > 0 for run in latency.runs for request in run.requests)


def test_encoding_a_text_requires_a_tokenizer() -> None:
    with _subject() as subject, pytest.raises(DataError, match="no tokenizer"):
        subject.encode("text")
