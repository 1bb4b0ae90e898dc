"""Sampled tokens have the target's distribution, whatever drafts: chi-squared tests against exact probabilities."""

import itertools
from collections import Counter

import numpy as np
import pytest

from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.engine.engine import Engine
from ingot.runtime.forward_batch import FloatArray, ForwardBatch
from ingot.runtime.speculation.draft_model import DraftModel
from ingot.runtime.speculation.drafter import Drafter
from ingot.runtime.speculation.length_control import LengthControl
from ingot.runtime.speculation.output_history import OutputHistory
from ingot.runtime.speculation.prompt_lookup import PromptLookup
from ingot.runtime.speculation.speculator import Speculator
from tests.simulators.fake_drafters import RandomDrafter
from tests.simulators.fake_executor import FakeExecutor

VOCAB = 4
PROMPT = [0, 1, 0, 2, 0, 3, 0]
TEMPERATURE = 6.0
NUM_SAMPLES = 4000


class OtherModel(FakeExecutor):
    """The target's logits, less certain and with a preference for token 0: a draft model that is often wrong."""

    def forward(self, batch: ForwardBatch) -> FloatArray:
        logits = super().forward(batch) * np.float32(0.5)
        logits[:, 0] += 2
        return logits


DRAFTERS: dict[str, Drafter] = {
    "random": RandomDrafter(VOCAB),
    "lookup": PromptLookup(),
    "suffix": PromptLookup(OutputHistory(4096)),
    "draft model": DraftModel(
        OtherModel(vocab_size=VOCAB, num_blocks=512, max_batch_tokens=256), target_vocab_size=VOCAB
    ),
}


def probabilities() -> dict[tuple[int, ...], float]:
    """Probability of each output of three tokens."""

    def following(engine: Engine, tokens: list[int]) -> FloatArray:
        weights = np.exp(engine.prompt_logits(tokens)[-1].astype(np.float64) / TEMPERATURE)
        normalized: FloatArray = weights / weights.sum()
        return normalized

    with Engine(FakeExecutor(vocab_size=VOCAB)) as engine:
        found = {}
        for output in itertools.product(range(VOCAB), repeat=3):
            steps = (following(engine, [*PROMPT, *output[:index]])[output[index]] for index in range(3))
            found[output] = float(np.prod([*steps]))
    return found


@pytest.mark.parametrize("name", DRAFTERS)
def test_sampled_tokens_have_the_targets_distribution(name: str) -> None:
    expected = probabilities()
    control = LengthControl(adapts=False)
    speculator = Speculator(DRAFTERS[name], vocab_size=VOCAB, num_draft_tokens=2, control=control)
    params = [SamplingParams(max_tokens=3, temperature=TEMPERATURE, seed=seed) for seed in range(NUM_SAMPLES)]
    with Engine(FakeExecutor(vocab_size=VOCAB, num_blocks=256, max_batch_tokens=256), speculator=speculator) as engine:
        done = engine.generate([PROMPT] * NUM_SAMPLES, params)
        metrics = engine.metrics().speculation
    assert metrics
    assert metrics.num_accepted_tokens > 100
    assert metrics.num_tested_tokens - metrics.num_accepted_tokens > 100
    counts = Counter(one.token_ids for one in done)
    statistic = sum((counts[each] - NUM_SAMPLES * p) ** 2 / (NUM_SAMPLES * p) for each, p in expected.items())
    freedom = len(expected) - 1
    assert statistic < freedom + 3.1 * (2 * freedom) ** 0.5, "less likely than 1 in 1000"
