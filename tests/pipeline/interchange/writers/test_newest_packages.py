"""Exports load in the newest transformers with compressed-tensors, in an environment of their own.

INGOT_TRANSFORMERS is the python of an environment with transformers, compressed-tensors, accelerate and torch.
"""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.adapters.loading import Loaded, Request
from benchmarks.peers import PeerFailed
from benchmarks.quantizers.runs import run_in

from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.model.importer import import_checkpoint
from tests.pipeline.checkpoint.formats.tiny_model import exported
from tests.reference_runner import ReferenceRunner

PYTHON = os.environ.get("INGOT_TRANSFORMERS")
TOKENS = (3, 1, 4, 1, 5, 9, 2, 6)
# It compares packed zero points with the shape of unpacked ones; llm-compressor's own files are refused likewise.
REFUSES_ZERO_POINTS = ("5.23.0", "5.24.0")
SCHEMES: dict[str, dict[str, Any]] = {
    "4 bits, symmetric": {"symmetric": True},
    "4 bits, asymmetric": {"symmetric": False},
}


@pytest.mark.skipif(PYTHON is None, reason="INGOT_TRANSFORMERS names no environment")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_export_has_the_same_logits_in_transformers(scheme: str, tmp_path: Path) -> None:
    assert PYTHON is not None
    folder = exported(tmp_path, "compressed-tensors", **SCHEMES[scheme])
    request = Request(folder, TOKENS[:2], 1, TOKENS, tmp_path / "logits.npy")
    try:
        answer = run_in(Path(PYTHON), "benchmarks.adapters.load_transformers", json.dumps(asdict(request), default=str))
    except PeerFailed as error:
        if scheme != "4 bits, asymmetric" or "mismatched" not in str(error):
            raise
        pytest.skip(f"transformers {' and '.join(REFUSES_ZERO_POINTS)} load no packed zero points: docs/formats.md")
    assert Loaded(**json.loads(answer)).tokens
    (ours,) = ReferenceRunner(import_checkpoint(Checkpoint.open(folder))).run_ragged([list(TOKENS)])
    theirs = np.load(request.logits)
    assert np.abs(theirs - ours).max() < 1e-4 * np.abs(ours).max()
