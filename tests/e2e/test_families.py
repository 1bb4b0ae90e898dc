"""Every family through the whole of it, recipe to runtime: the logits are transformers' own.

A step takes 7 tokens and the windows are of 8, so that prompts are chunked inside their windows and several are in one
step. What is decoded token by token must have the bits that the same tokens have as a prompt.
"""

import numpy as np
from numpy.typing import NDArray

from ingot.artifact import Artifact
from ingot.artifact.manifest import CPU_ENGINES
from ingot.runtime import Engine, SamplingParams
from tests.conftest import BuildArtifact
from tests.each_case import each_case
from tests.oracle.cases import CASES, LENGTHS, WINDOW, Case
from tests.parity import CHECKPOINTS, LOGITS, compare, engine_logits, load_logits, settings_of
from tests.tolerances import within

FAMILY_CASES = [case for case in CASES if case.name == case.model_type]
MAX_BATCH_TOKENS = 7
DECODED = SamplingParams(max_tokens=12, ignore_eos=True)
QUANTIZED = {"int8-cpu": "quantized.int8", "int4-cpu": "quantized.int4"}  # recipe -> tolerance


def build_case(build_unmeasured: BuildArtifact, case: Case, engine: str, recipe: str = "fp32-cpu") -> Artifact:
    settings = (*settings_of(case), f"cpu.engine={engine}")
    return build_unmeasured(recipe, CHECKPOINTS / case.name, *settings)


@each_case("engine", CPU_ENGINES)
@each_case("case", CASES, ids=lambda case: case.name)
def test_logits_equal_transformers_in_chunks_and_ragged_batches(
    build_unmeasured: BuildArtifact, case: Case, engine: str
) -> None:
    tokens, expected = load_logits(CHECKPOINTS / case.name / LOGITS)
    artifact = build_case(build_unmeasured, case, engine)
    parity = compare(engine_logits(artifact, tokens, MAX_BATCH_TOKENS), expected)
    print(f"{case.name}: worst difference {parity.worst:.1e}, limit {parity.limit:.1e}")
    assert parity.worst <= parity.limit


@each_case("engine", CPU_ENGINES)
@each_case("case", CASES, ids=lambda case: case.name)
def test_tokens_that_are_decoded_have_the_bits_of_a_prompt(
    build_unmeasured: BuildArtifact, case: Case, engine: str
) -> None:
    tokens, _ = load_logits(CHECKPOINTS / case.name / LOGITS)
    artifact = build_case(build_unmeasured, case, engine)
    with Engine.load(artifact, kv_blocks=32, max_batch_tokens=MAX_BATCH_TOKENS) as loaded:
        for prompt, done in zip(tokens, loaded.generate(tokens, DECODED, keep_logits=True), strict=True):
            assert done.logits is not None
            whole = loaded.prompt_logits([*prompt, *done.token_ids[:-1]])
            assert np.array_equal(whole[len(prompt) - 1 :].view(np.int32), done.logits.view(np.int32))


@each_case("engine", CPU_ENGINES)
@each_case("recipe", QUANTIZED)
@each_case("case", FAMILY_CASES, ids=lambda case: case.name)
def test_quantized_logits_stay_near(build_unmeasured: BuildArtifact, case: Case, recipe: str, engine: str) -> None:
    tokens, expected = load_logits(CHECKPOINTS / case.name / LOGITS)
    measured = engine_logits(build_case(build_unmeasured, case, engine, recipe), tokens, MAX_BATCH_TOKENS)
    error = relative_error(np.concatenate(measured), np.concatenate(expected))
    assert within(QUANTIZED[recipe], error, case.name)


def relative_error(measured: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    return float(np.linalg.norm(measured - expected) / np.linalg.norm(expected))


def test_the_prompts_are_longer_than_window_and_step() -> None:
    assert min(LENGTHS) > WINDOW > MAX_BATCH_TOKENS
