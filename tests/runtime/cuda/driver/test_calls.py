"""Calls of the CUDA driver: what is refused, and errors that say what to do."""

from typing import Any

import pytest

MESSAGES = {
    "no_gpu": "no GPU can be used: CUDA_ERROR_NO_DEVICE (failed): no NVIDIA GPU is visible",
    "old_driver": "the driver supports CUDA 12.4; kernels for a shim (SM 120) need CUDA 12.8: update NVIDIA's driver",
    "missing_function": "capturing a graph: the driver lacks a function that cuda-bindings need",
    "full_gpu": "the arena takes 4.2 MB, and a shim has 3.1 MB of 3.1 MB free; ask for fewer KV blocks",
    "other_gpu": "kernels are compiled for SM 90, and a shim has SM 89; build it for the target cuda-sm89",
}


@pytest.mark.parametrize("scenario", MESSAGES)
def test_unusable_gpus_and_drivers_are_refused_with_advice(driver_scenarios: dict[str, Any], scenario: str) -> None:
    assert MESSAGES[scenario] in driver_scenarios[scenario]


def test_a_refused_launch_names_kernel_and_node_and_leaves_the_stream_usable(driver_scenarios: dict[str, Any]) -> None:
    for message in driver_scenarios["refused_launch"]:
        assert message.startswith(
            "launching scale_rows for 'layers.3.norm', grid (1, 1, 1): CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"
        )


def test_a_failure_that_loses_the_context_is_reported_by_later_calls(driver_scenarios: dict[str, Any]) -> None:
    first, second = driver_scenarios["lost_context"]
    assert first.startswith("a step: CUDA_ERROR_ILLEGAL_ADDRESS (an illegal memory access); the GPU's context is lost")
    assert "INGOT_CUDA_BLOCKING=1" in first
    assert second.startswith("the next: the GPU's context was lost before (a step: CUDA_ERROR_ILLEGAL_ADDRESS")


def test_kernels_that_the_gpu_cannot_run_are_refused_by_name(driver_scenarios: dict[str, Any]) -> None:
    image_, shared, symbol = driver_scenarios["bad_kernels"]
    assert image_.startswith("loading the kernel scale_rows: CUDA_ERROR_INVALID_IMAGE (failed): the driver rejects")
    assert shared.startswith(
        "the kernel scale_rows needs 102400 bytes of shared memory, and the GPU gives a block 101376"
    )
    assert symbol.startswith("loading the kernel scale_rows: CUDA_ERROR_NOT_FOUND")
