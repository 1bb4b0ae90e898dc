"""Engines whose memory is on the heap, for sanitizers, have the bits of others."""

from pathlib import Path

import numpy as np
import pytest

from ingot.artifact import Artifact
from ingot.runtime import Engine
from ingot.runtime.cpu.native.library import native_library
from ingot.runtime.forward_batch import FloatArray
from tests.runtime.cpu.native.tiny_program import write_artifact
from tests.simulators.heap_pools import place_on_heap

pytestmark = pytest.mark.skipif(native_library() is None, reason="the library was not built")


def logits_of(artifact: Artifact) -> FloatArray:
    with Engine.load(artifact, kv_blocks=8, num_threads=2, max_batch_tokens=32) as engine:
        return engine.prompt_logits(list(range(40)))


def test_logits_have_the_same_bits(tmp_path: Path) -> None:
    artifact = write_artifact(tmp_path / "tiny")
    expected = logits_of(artifact)
    on_heap = place_on_heap()
    try:
        found = logits_of(artifact)
    finally:
        on_heap.undo()
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(logits_of(artifact), expected)
