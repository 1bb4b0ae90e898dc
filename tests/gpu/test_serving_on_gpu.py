"""A server over the CUDA engine on a GPU: the scenarios of tests/runtime/cuda/serving.py, with compiled kernels."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from ingot.artifact import Artifact
from tests.conftest import BuildArtifact
from tests.data_paths import DEMO_MODEL
from tests.runtime.cuda.serving import ON_A_GPU, OVERRIDES, Scenario, expected_texts

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def artifact(gpu_sm: int, build_unmeasured: BuildArtifact) -> Artifact:
    """The demo model in 4 bits; batch-invariant, so that tokens are equal in every batch."""
    return build_unmeasured("int4-cuda", DEMO_MODEL, f"target=cuda-sm{gpu_sm}", "gpu.batch_invariant=true", *OVERRIDES)


@pytest.fixture(scope="module")
def expected(artifact: Artifact) -> Mapping[str, str]:
    return expected_texts(artifact)


@pytest.mark.parametrize("scenario", ON_A_GPU, ids=lambda scenario: scenario.__name__)
def test_the_server_gives_the_tokens_of_requests_alone(
    scenario: Scenario, artifact: Artifact, expected: Mapping[str, str], tmp_path: Path
) -> None:
    scenario(artifact, expected, tmp_path)
