"""Stand-in for the module tensorrt_rtx, as far as running plans needs it. Records calls; computes nothing.

test_fake_tensorrt.py checks that the real module has the same names.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

VERSION = "1.7.1.116"


class Context:
    """An execution context that records its calls."""

    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        self.calls.append(("profile", profile))
        return profile < 2

    def set_device_memory(self, address: int, size: int) -> None:
        self.calls.append(("memory", address, size))

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.calls.append(("shape", name, shape))
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.calls.append((name, address))
        return name != "missing"

    def execute_async_v3(self, stream: int) -> bool:
        self.calls.append(("execute", stream))
        return True

    def is_stream_capturable(self, stream: int) -> bool:
        return True


class RuntimeConfig:
    dynamic_shapes_kernel_specialization_strategy = "LAZY"

    def __init__(self, library: "FakeTensorRT") -> None:
        self.library = library

    def set_execution_context_allocation_strategy(self, strategy: str) -> None:
        self.library.calls.append(("allocation", strategy))

    def create_runtime_cache(self) -> Any:
        return SimpleNamespace(serialize=lambda: b"compiled", deserialize=self.library.loaded_caches.append)

    def set_runtime_cache(self, cache: Any) -> None:
        self.library.caches.append(cache)


class FakeTensorRT:
    """The module; `refuses` makes it reject every plan."""

    __name__ = "tensorrt_rtx"

    def __init__(self, version: str = VERSION, refuses: bool = False) -> None:
        self.__version__ = version
        self.calls: list[Any] = []
        self.caches: list[Any] = []
        self.loaded_caches: list[bytes] = []
        self.refuses = refuses
        severity = SimpleNamespace(INTERNAL_ERROR=0, ERROR=1, WARNING=2, INFO=3, VERBOSE=4)
        self.ILogger = type("ILogger", (), {"Severity": severity})
        self.ExecutionContextAllocationStrategy = SimpleNamespace(USER_MANAGED="USER_MANAGED")
        self.DynamicShapesKernelSpecializationStrategy = SimpleNamespace(EAGER="EAGER")
        diagnostics = {"VERSION_MISMATCH": 1, "OLD_CUDA_DRIVER": 4}
        self.EngineInvalidityDiagnostics = SimpleNamespace(__members__=diagnostics)

    def Runtime(self, logger: Any) -> Any:  # noqa: N802
        return SimpleNamespace(deserialize_cuda_engine=self._engine, get_engine_validity=lambda plan: ("INVALID", 4))

    def _engine(self, plan: bytes) -> Any:
        if self.refuses:
            return None
        return SimpleNamespace(
            num_optimization_profiles=2,
            get_device_memory_size_for_profile_v2=lambda profile: 1000 * (profile + 1),
            create_runtime_config=lambda: RuntimeConfig(self),
            create_execution_context=lambda config: Context(self.calls),
        )


def importing(module: FakeTensorRT | None) -> Callable[[str], Any]:
    """Return a function that imports the module; with None, one that finds no module."""

    def load(name: str) -> Any:
        if module is None:
            raise ImportError(name)
        return module

    return load
