"""The store of activations: chunks beyond the memory limit go to one file and come back unchanged."""

import numpy as np

from ingot.pipeline.calibrate.activations import Activations


def test_spilled_chunks_are_read_back_and_their_space_is_reused() -> None:
    with Activations(memory_bytes=100) as store:
        store.put("small", 0, np.ones(10, np.float32))
        store.put("large", 0, np.arange(100.0))
        store.put("large", 1, np.arange(100.0).reshape(4, 25) * 2)
        assert (store.held_bytes, store.spilled_bytes) == (40, 1600)
        np.testing.assert_array_equal(store.get("large", 0), np.arange(100.0))
        np.testing.assert_array_equal(store.get("large", 1), np.arange(100.0).reshape(4, 25) * 2)
        store.keep_only({"small"}, 0)
        assert store.spilled_bytes == 800
        store.put("other", 0, np.arange(100.0) + 5)
        assert {(name, chunk) for name, chunk, _ in store.items()} == {("small", 0), ("large", 1), ("other", 0)}
        np.testing.assert_array_equal(store.get("other", 0), np.arange(100.0) + 5)
        np.testing.assert_array_equal(store.get("large", 1), np.arange(100.0).reshape(4, 25) * 2)
        store.keep_only({"small"})
        assert (store.held_bytes, store.spilled_bytes) == (40, 0)
