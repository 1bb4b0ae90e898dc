"""Batches of whole sequences: what a token attends to."""

import numpy as np

from ingot.pipeline.calibrate.sequences import causal_mask


def test_a_token_attends_to_itself_and_the_window_before_it() -> None:
    np.testing.assert_array_equal(causal_mask(3, 0) == 0, np.tri(3, dtype=bool))
    np.testing.assert_array_equal(causal_mask(4, 2)[3] == 0, [False, False, True, True])
