"""TensorRT-RTX has the names that plans use, and that FakeTensorRT imitates."""

from typing import Any

import pytest

from tests.each_case import each_case

trt: Any = pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed: pip install '.[tensorrt]'")

NAMES = {
    "Runtime": ("deserialize_cuda_engine", "get_engine_validity"),
    "ICudaEngine": (
        "create_execution_context",
        "create_runtime_config",
        "get_device_memory_size_for_profile_v2",
        "num_optimization_profiles",
    ),
    "IRuntimeConfig": (
        "create_runtime_cache",
        "dynamic_shapes_kernel_specialization_strategy",
        "set_execution_context_allocation_strategy",
        "set_runtime_cache",
    ),
    "IRuntimeCache": ("deserialize", "serialize"),
    "IExecutionContext": (
        "execute_async_v3",
        "is_stream_capturable",
        "set_device_memory",
        "set_input_shape",
        "set_optimization_profile_async",
        "set_tensor_address",
    ),
    "ExecutionContextAllocationStrategy": ("USER_MANAGED",),
    "DynamicShapesKernelSpecializationStrategy": ("EAGER",),
    "EngineInvalidityDiagnostics": ("OLD_CUDA_DRIVER", "__members__"),
    "BuilderFlag": ("REQUIRE_USER_ALLOCATION",),
}


@each_case("owner", NAMES)
def test_tensorrt_has_every_name(owner: str) -> None:
    missing = [name for name in NAMES[owner] if not hasattr(getattr(trt, owner), name)]
    assert not missing


def test_diagnoses_are_bits_of_a_number() -> None:
    assert all(int(bit) >= 0 for bit in trt.EngineInvalidityDiagnostics.__members__.values())
