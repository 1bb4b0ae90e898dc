"""Seeded calibration sequences for the tiny decoder, and a calibration service on them."""

import numpy as np

from ingot.passes.calibration import CalibrationFacts
from ingot.pipeline.calibrate import CalibrationData, CalibrationEngine
from tests.passes.tiny_decoder import VOCAB

SEQUENCES, TOKENS = 40, 32


def calibration_data(sequences: int = SEQUENCES, tokens: int = TOKENS, vocab: int = VOCAB) -> CalibrationData:
    """Tokens of a skewed distribution, like that of text."""
    drawn = np.random.default_rng(5).zipf(1.3, (sequences, tokens)) % vocab
    facts = CalibrationFacts("text.txt", "0" * 64, drawn.size, sequences, tokens, 0)
    return CalibrationData(facts, drawn.astype(np.int64))


def calibration(memory_bytes: int = 1 << 30) -> CalibrationEngine:
    """A calibration service on these sequences."""
    return CalibrationEngine(calibration_data(), memory_bytes=memory_bytes)
