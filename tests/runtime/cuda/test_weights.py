"""Upload of weights through small pinned buffers."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ingot.errors import EngineError
from ingot.runtime.cuda.weights import reserve_weights, upload_weights
from tests.simulators.interpreted_device import InterpretedDevice


@pytest.mark.parametrize("staging_bytes", [256, 1024, 2**20])
def test_weights_arrive_whole_through_buffers_smaller_than_they_are(tmp_path: Path, staging_bytes: int) -> None:
    rng = np.random.default_rng(0)
    tensors = {f"w{size}": rng.integers(0, 256, size).astype(np.uint8) for size in (1, 700, 256, 3000, 5, 0)}
    save_file(tensors, tmp_path / "weights.safetensors")
    device = InterpretedDevice()
    weights = upload_weights(device, device.make_stream(), tmp_path / "weights.safetensors", staging_bytes)
    for name, tensor in tensors.items():
        assert weights.addresses[name] % 256 == 0
        if tensor.size:
            np.testing.assert_array_equal(device.view(weights.addresses[name], tensor.size), tensor)


def test_reserved_weights_have_the_same_places_and_nothing_is_copied(tmp_path: Path) -> None:
    save_file({f"w{size}": np.zeros(size, np.uint8) for size in (1, 700, 256)}, tmp_path / "weights.safetensors")
    one, other = InterpretedDevice(), InterpretedDevice()
    uploaded = upload_weights(one, one.make_stream(), tmp_path / "weights.safetensors")
    reserved = reserve_weights(other, other.make_stream(), tmp_path / "weights.safetensors")
    starts = [min(weights.addresses.values()) for weights in (uploaded, reserved)]
    places = [
        {name: at - start for name, at in weights.addresses.items()}
        for weights, start in zip((uploaded, reserved), starts, strict=True)
    ]
    assert places[0] == places[1]
    assert (reserved.dtypes, reserved.num_bytes) == (uploaded.dtypes, uploaded.num_bytes)
    assert other.copied_bytes == 0


def test_weights_that_the_device_has_no_memory_for_are_named(tmp_path: Path) -> None:
    save_file({"w": np.zeros(3 * 2**20, np.uint8)}, tmp_path / "weights.safetensors")
    device = InterpretedDevice(2**20)
    with pytest.raises(EngineError, match=r"weights.safetensors \(1 weights\) takes 3.1 MB, and .* has 1.0 MB"):
        upload_weights(device, device.make_stream(), tmp_path / "weights.safetensors")
