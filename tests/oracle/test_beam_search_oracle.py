"""Beam search on real models, end to end, against transformers' `generate(num_beams=...)`: tokens and scores."""

from typing import Any

import numpy as np
import pytest

from ingot.runtime import BeamParams, Engine
from tests.conftest import BuildArtifact
from tests.data_paths import DEMO_MODEL, shared_data

torch: Any = pytest.importorskip("torch", reason="the oracle needs torch")
transformers: Any = pytest.importorskip("transformers", reason="the oracle needs transformers")

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]

MODELS = {"demo": str(DEMO_MODEL), "stories260K": "models/stories260K", "babyllama-105": "models/babyllama-105"}
# width, length penalty, early stopping, tokens that end a sequence besides the model's own
CASES: list[tuple[int, float, Any, int]] = [
    (1, 1.0, False, 0),
    (2, 1.0, False, 2),
    (3, 0.0, True, 4),
    (4, 1.0, False, 0),
    (4, 1.0, "never", 3),
    (4, 2.0, True, 3),
    (4, -1.0, False, 3),
    (8, 0.6, "never", 2),
    (8, 1.0, False, 6),
]


@pytest.mark.parametrize("model", MODELS)
def test_the_sequences_and_scores_are_those_of_transformers(build_unmeasured: BuildArtifact, model: str) -> None:
    torch.set_num_threads(1)
    checkpoint = DEMO_MODEL if model == "demo" else shared_data(MODELS[model])
    oracle = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    rng = np.random.default_rng(len(model))
    with Engine.load(build_unmeasured("fp32-cpu", checkpoint), kv_blocks=24, max_batch_tokens=32) as engine:
        vocab_size, eos = engine.model.vocab_size, sorted(engine.model.eos_token_ids)
        for number, (width, length_penalty, early_stopping, num_stops) in enumerate(CASES):
            prompt = rng.integers(3, vocab_size, int(rng.choice([2, 15, 16, 33]))).tolist()
            likely = engine.prompt_logits(prompt)[-1].argsort()[::-1][20 : 20 + num_stops].tolist()
            stops = tuple(token for token in likely if token not in eos)
            params = BeamParams(width, 24, length_penalty, early_stopping, num_return=width, stop_token_ids=stops)
            result = engine.beam_search(prompt, params)
            with torch.no_grad():
                expected = oracle.generate(
                    torch.tensor([prompt]),
                    attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                    num_beams=width,
                    num_return_sequences=width,
                    length_penalty=length_penalty,
                    early_stopping=early_stopping,
                    eos_token_id=[*eos, *stops],
                    pad_token_id=0,
                    max_new_tokens=24,
                    do_sample=False,
                    return_dict_in_generate=True,
                    output_scores=True,
                )
            for rank, choice in enumerate(result.choices):
                tokens = expected.sequences[rank, len(prompt) :].tolist()
                assert list(choice.token_ids) == tokens[: len(choice.token_ids)], (number, rank)
                assert set(tokens[len(choice.token_ids) :]) <= {0, [*eos, *stops][0]}, "more than padding follows"
                if width > 1:
                    assert choice.score == pytest.approx(float(expected.sequences_scores[rank]), rel=2e-4)
