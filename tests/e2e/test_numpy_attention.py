"""Where no C compiler was there to build the attention kernel, everything works in numpy, with the same results."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from ingot.artifact import Artifact
from ingot.runtime import Engine
from ingot.runtime.cpu.native.attention import attention_backend
from ingot.runtime.cpu.native.library import native_library
from ingot.runtime.forward_batch import FloatArray
from tests.conftest import BuildArtifact
from tests.data_paths import FIXTURES
from tests.tolerances import within

pytestmark = pytest.mark.skipif(native_library() is None, reason="the kernel was not built: all tests run in numpy")


def generated(artifact: Artifact, attention: str) -> list[int]:
    command = [
        sys.executable,
        "-m",
        "ingot",
        "run",
        str(artifact.path),
        "def read(path):",
        "--max-tokens",
        "24",
        "--json",
    ]
    environment = {**os.environ, "INGOT_ATTENTION": attention}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    token_ids: list[int] = json.loads(done.stdout)["token_ids"]
    return token_ids


def logits(artifact: Artifact, attention: str) -> FloatArray:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INGOT_ATTENTION", attention)
        attention_backend.cache_clear()
        with Engine.load(artifact, kv_blocks=8, max_batch_tokens=7) as engine:
            rows = engine.prompt_logits(list(range(50)))
    attention_backend.cache_clear()
    return rows


def test_a_command_that_runs_in_numpy_generates_the_same_tokens(build_unmeasured: BuildArtifact) -> None:
    artifact = build_unmeasured("fp32-cpu")
    assert generated(artifact, "numpy") == generated(artifact, "native")


@pytest.mark.parametrize("family", ["gemma2", "mistral"])
def test_logits_of_models_with_windows_are_those_of_the_kernel(family: str, build_unmeasured: BuildArtifact) -> None:
    artifact = build_unmeasured("fp32-cpu", FIXTURES / "checkpoints" / family)
    assert within("parity.float32", float(np.abs(logits(artifact, "numpy") - logits(artifact, "native")).max()))
