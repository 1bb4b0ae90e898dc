"""The surviving set of every warper, and the penalties, against transformers' own logits processors."""

import numpy as np
import pytest

from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.requests.sampler import Sampler
from ingot.runtime.truncation_sampling import surviving_tokens
from tests.each_case import each_case

pytestmark = pytest.mark.oracle
torch = pytest.importorskip("torch")
processors = pytest.importorskip("transformers").generation.logits_process

VOCAB = 700
ROWS = [np.random.default_rng(seed).standard_normal(VOCAB).astype(np.float32) * 4 for seed in range(25)]
CASES = [
    {"top_k": 1},
    {"top_k": 20},
    {"top_k": 10_000},
    {"top_p": 0.1},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"min_p": 0.01},
    {"min_p": 0.3},
    {"temperature": 0.4, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 2.5, "top_k": 300, "top_p": 0.7},
    {"temperature": 1.7, "top_p": 0.8, "min_p": 0.05},
]


@each_case("case", CASES, ids=str)
def test_the_surviving_tokens_are_those_of_transformers(case: dict[str, float]) -> None:
    params = SamplingParams(**{"temperature": 1.0, **case})  # type: ignore[arg-type]
    warpers = [processors.TemperatureLogitsWarper(float(params.temperature))]
    warpers += [processors.TopKLogitsWarper(params.top_k)] if params.top_k else []
    warpers += [processors.TopPLogitsWarper(params.top_p)] if params.top_p < 1 else []
    warpers += [processors.MinPLogitsWarper(params.min_p)] if params.min_p else []
    for row in ROWS:
        scores = torch.from_numpy(row)[None].double()
        for warper in warpers:
            scores = warper(None, scores)
        assert surviving_tokens(row, params).tolist() == torch.isfinite(scores[0]).nonzero()[:, 0].tolist()


@pytest.mark.parametrize("penalty", [0.7, 1.0, 1.3, 4.0])
def test_the_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    prompt, generated = [3, 3, 9, 200], [9, 650, 650, 11]
    processor = processors.RepetitionPenaltyLogitsProcessor(penalty)
    for row in ROWS:
        expected = processor(torch.tensor([prompt + generated]), torch.from_numpy(row)[None].clone())[0]
        sampler = Sampler(SamplingParams(repetition_penalty=penalty), prompt)
        assert sampler.sample(row, generated).token_id == int(expected.argmax())
        assert np.array_equal(sampler._adjusted(row, generated), expected.numpy())
