"""The driver code through cuda-bindings, with a shim library in place of the driver."""

from typing import Any

import numpy as np

from ingot.runtime.cuda.executor import CudaExecutor
from ingot.runtime.options import EngineOptions
from tests.runtime.cuda.batches import Growing, token_ids
from tests.simulators.interpreted_device import InterpretedDevice


def test_memory_copies_and_launches_reach_the_driver_with_their_arguments(driver_scenarios: dict[str, Any]) -> None:
    found = driver_scenarios["calls"]
    assert found["facts"] == ["a shim", 90, 4096]
    assert found["copied"] == [*range(16, 32), *[0] * 16]
    once = [5, 6, 7, 256, 64 * 1024, 64, -3, 2, 0, 0]  # grid, threads, shared, arguments, two null pointers
    assert found["seen"] == [once] * 3
    assert found["before_replay"] == 1  # nothing runs during a capture
    assert "rows 4 x 16" in found["log"]
    assert "attribute 8 of scale_rows = 65536" in found["log"]
    loaded, captured = (found["log"].index(line) for line in ("attribute 4 of scale_rows", "begin capture mode 1"))
    assert loaded < captured  # the driver loads code at the first query
    assert [line for line in found["log"] if "capture" in line] == ["begin capture mode 1", "end capture of 2"]


def test_kernels_that_wait_for_the_launch_before_may_start_before_it_ends(driver_scenarios: dict[str, Any]) -> None:
    waiting, turned_off, usual = driver_scenarios["dependent_launches"]
    launch = "launch scale_rows grid 2 3 4 threads 256 shared 1024: 8 4 4 8 8"
    assert waiting == ["launch attribute 6 = 1", launch]  # PROGRAMMATIC_STREAM_SERIALIZATION
    assert turned_off == usual == [launch]


def test_closing_frees_everything_except_pinned_memory_in_use(driver_scenarios: dict[str, Any]) -> None:
    found = driver_scenarios["calls"]
    assert found["used"] == 0
    assert "unpin" not in found["log"]
    assert found["after"] == ["unpin", "unpin", "release"]


def test_the_executor_through_the_driver_has_the_interpreted_devices_logits(
    driver_scenarios: dict[str, Any], launches: Any
) -> None:
    device = InterpretedDevice()
    executor = CudaExecutor(launches, device, EngineOptions(kv_blocks=8))
    sequences = Growing([token_ids(7)], [[3, 1]])
    for count, logits in zip((5, 1, 1), driver_scenarios["executor"]["logits"], strict=True):
        np.testing.assert_array_equal(executor.forward(sequences.step([count])), np.array(logits, np.float32))
    executor.close()
    assert driver_scenarios["executor"]["used"] == 0
    assert driver_scenarios["executor"]["moved"]  # a block, by another thread
    assert sum(line.startswith("replay") for line in driver_scenarios["executor"]["log"]) == device.num_replays


def test_blocks_move_through_the_driver_with_one_call_for_neighbours(driver_scenarios: dict[str, Any]) -> None:
    found = driver_scenarios["host_blocks"]
    timed = ["event flags 0"] * 2
    copies = [line for line in found["log"] if line.startswith("out")]
    assert copies == ["out 512", "out 1024"]
    assert found["log"] == [*timed, "record", *copies, "record", *["query"] * 3]
    assert found["polls"] == [[False] * 3, [False] * 3, [True] * 3]
    assert found["seconds"] == [0.5e-3 / 3] * 3
    assert found["moved"]


def test_host_memory_and_copies_that_the_driver_refuses_are_named(driver_scenarios: dict[str, Any]) -> None:
    found = driver_scenarios["host_blocks"]
    assert found["refused"].startswith("host memory for 100 KV blocks (kv_host_bytes) takes ")
    assert "page-locked host memory, which the system refuses; ask for less (kv_host_bytes" in found["refused"]
    done, error, reported = found["failed"]
    assert done
    assert "ILLEGAL_ADDRESS" in error
    assert "KV blocks can no longer be copied between the GPU and host memory" in reported
    assert "start the process again" in reported


def test_a_slow_part_is_host_memory_at_the_addresses_after_the_gpus(driver_scenarios: dict[str, Any]) -> None:
    found = driver_scenarios["slow_part"]
    assert found["mapped"] == found["managed"] == [True] * 5
    fast, slow = 4 << 20, 2 << 20  # blocks of 512 KiB in steps of 2 MiB
    assert found["log"] == [
        f"reserve {fast + slow}",
        f"create {fast} at 1",
        f"map {fast} at 0",
        f"create {slow} at 3",
        f"map {slow} at {fast}",
        f"unmap {slow}",
        f"release {slow}",
        f"unmap {fast}",
        f"release {fast}",
        f"free range {fast + slow}",
    ]
    assert found["used"] == 0


def test_a_driver_that_maps_no_host_memory_gets_managed_memory(driver_scenarios: dict[str, Any]) -> None:
    found, (fast, slow) = driver_scenarios["slow_part"], (5 << 19, 3 << 19)
    assert found["advised"] == [
        f"managed {fast + slow} flags 1",
        f"advise 3 of {fast} for 1",  # preferred: the GPU
        f"advise 3 of {slow} for 2",  # preferred: the host
        f"advise 5 of {fast + slow} for 1",  # read by the GPU where it is
    ]
    assert "neither maps host memory after the GPU's nor reads managed" in found["refused"]
    assert "4.2 MB of the host's memory, which has less free; ask for fewer KV blocks" in found["full"]
