"""Hybrids run in the calibration service: whole sequences of different lengths, with transformers' logits."""

import numpy as np
import pytest

from ingot.pipeline.calibrate.data import CalibrationData
from ingot.pipeline.calibrate.engine import CalibrationEngine
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.model.importer import import_checkpoint
from tests.parity import CHECKPOINTS, LOGITS, compare, load_logits
from tests.passes.calibration_data import calibration_data


@pytest.mark.parametrize("name", ["qwen3_next", "olmo_hybrid", "lfm2", "bamba", "falcon_h1"])
def test_the_service_computes_the_logits_of_sequences_of_different_lengths(name: str) -> None:
    tokens, expected = load_logits(CHECKPOINTS / name / LOGITS)
    lengths = np.array([len(prompt) for prompt in tokens])
    padded = np.zeros((len(tokens), lengths.max()), np.int64)
    for row, prompt in zip(padded, tokens, strict=True):
        row[: len(prompt)] = prompt
    data = CalibrationData(calibration_data(1, 1, 128).facts, padded, lengths)
    model = import_checkpoint(Checkpoint.open(CHECKPOINTS / name))
    found = np.split(np.concatenate(list(CalibrationEngine(data).logits(model))), np.cumsum(lengths)[:-1])
    parity = compare(found, expected)
    assert parity.worst <= parity.limit
