"""The families of the other tables of cases than cases.py end to end, on both CPU engines: logits agree.

As test_families.py, with one build of each family and engine.
"""

import numpy as np

from ingot.artifact import Artifact
from ingot.artifact.manifest import CPU_ENGINES
from ingot.runtime import Engine, SamplingParams
from tests.conftest import BuildArtifact
from tests.each_case import each_case
from tests.oracle.cases import Case
from tests.oracle.dense_cases import DENSE_CASES
from tests.oracle.hybrid_cases import HYBRID_CASES
from tests.oracle.latent_cases import LATENT_CASES
from tests.oracle.moe_cases import MOE_CASES
from tests.oracle.unequal_cases import UNEQUAL_CASES
from tests.parity import CHECKPOINTS, LOGITS, compare, engine_logits, load_logits

MAX_BATCH_TOKENS = 7
DECODED = SamplingParams(max_tokens=6, ignore_eos=True)
BUILDS = [
    (case, engine)
    for case in (*DENSE_CASES, *MOE_CASES, *LATENT_CASES, *UNEQUAL_CASES, *HYBRID_CASES)
    for engine in CPU_ENGINES
    if (case.name, engine) != ("gemma3n_text", "native")  # onnxruntime alone
]


def built(build_unmeasured: BuildArtifact, case: Case, engine: str) -> Artifact:
    return build_unmeasured("fp32-cpu", CHECKPOINTS / case.name, f"cpu.engine={engine}")


@each_case(("case", "engine"), BUILDS, ids=lambda value: value if isinstance(value, str) else value.name)
def test_prompts_in_chunks_and_decoded_tokens(build_unmeasured: BuildArtifact, case: Case, engine: str) -> None:
    tokens, expected = load_logits(CHECKPOINTS / case.name / LOGITS)
    artifact = built(build_unmeasured, case, engine)
    parity = compare(engine_logits(artifact, tokens, MAX_BATCH_TOKENS), expected)
    print(f"{case.name}: worst difference {parity.worst:.1e}, limit {parity.limit:.1e}")
    assert parity.worst <= parity.limit
    with Engine.load(artifact, kv_blocks=32, max_batch_tokens=MAX_BATCH_TOKENS) as loaded:
        for prompt, done in zip(tokens, loaded.generate(tokens, DECODED, keep_logits=True), strict=True):
            assert done.logits is not None
            whole = loaded.prompt_logits([*prompt, *done.token_ids[:-1]])
            assert np.array_equal(whole[len(prompt) - 1 :].view(np.int32), done.logits.view(np.int32))
