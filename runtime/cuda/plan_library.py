"""TensorRT at run time: tensorrt_rtx or tensorrt, whichever built the artifact's plans, in exactly that version.

Only TensorRT-RTX has runtime caches and kernel specialization, because it compiles a plan's kernels on the GPU; code
that uses them checks for the name first. TensorRT's log goes to Python's `ingot.tensorrt`.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from ingot.errors import ArtifactError, EngineError
from ingot.version import install_command

_log = logging.getLogger(__name__)
_MODULES = {"tensorrt-rtx": "tensorrt_rtx", "tensorrt": "tensorrt"}
tensorrt_log = logging.getLogger("ingot.tensorrt")


def load_plan_library(name: str, version: str, load: Callable[[str], Any]) -> "PlanLibrary":
    """Load the library. EngineError when it is missing or of another version; ArtifactError for an unknown name."""
    if name not in _MODULES:
        raise ArtifactError(
            f"the plans are of {name!r}, which this version of Ingot does not support; build the artifact again"
        )
    try:
        module = load(_MODULES[name])
    except ImportError as error:
        raise EngineError(
            f"running TensorRT plans needs {name} {version}: {install_command('tensorrt')} {name}=={version}"
        ) from error
    installed = str(module.__version__)
    if installed != version:
        raise EngineError(
            f"the plans are of {name} {version}, and {installed} is installed: pip install {name}=={version}, or build "
            "the artifact again"
        )
    runtime = module.Runtime(tensorrt_logger(module))
    if runtime is None:
        raise EngineError(f"{name} {version} cannot start; see its log for the reason")
    return PlanLibrary(name, version, module, runtime)


@dataclass
class PlanLibrary:
    """A TensorRT module, its runtime, and its cache of compiled kernels."""

    name: str
    version: str
    module: Any = field(repr=False)
    runtime: Any = field(repr=False)
    compiled: bool = False  # whether kernels were compiled since the cache was last saved
    _cache: Any = None
    _file: Path | None = None

    def engine(self, plan: bytes, file: str) -> Any:
        """Make the engine of a plan. EngineError with TensorRT's diagnosis when it rejects the plan."""
        engine = self.runtime.deserialize_cuda_engine(plan)
        if engine is None:
            raise EngineError(f"{file}: {self.name} {self.version} rejects the plan{self._diagnosis(plan)}")
        return engine

    def make_context(self, engine: Any) -> Any:
        """Make a context without memory of its own; its kernels are compiled for the shapes that it gets."""
        trt, config = self.module, engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        if hasattr(trt, "DynamicShapesKernelSpecializationStrategy"):
            eager = trt.DynamicShapesKernelSpecializationStrategy.EAGER  # never during a capture
            config.dynamic_shapes_kernel_specialization_strategy = eager
            self._share_cache(config)
        return engine.create_execution_context(config)

    def use_cache(self, file: Path) -> None:
        """Set the file that keeps compiled kernels between starts; contexts made from now on use its content."""
        self._file = file

    def save_cache(self) -> None:
        """Write the cache to its file, if kernels were compiled since the last time."""
        if self.compiled and self._cache is not None and self._file is not None:
            _write(self._file, bytes(self._cache.serialize()))
        self.compiled = False

    def _share_cache(self, config: Any) -> None:
        if self._cache is None:
            self._cache = config.create_runtime_cache()
            if self._file is not None and self._file.is_file():
                loaded = self._cache.deserialize(self._file.read_bytes())
                _log.info(
                    "compiled plans of %s: %s", self._file, "loaded" if loaded else "made by another driver or GPU"
                )
        config.set_runtime_cache(self._cache)

    def _diagnosis(self, plan: bytes) -> str:
        validity = getattr(self.runtime, "get_engine_validity", None)
        if validity is None:
            return "; see its log for the reason"
        _, bits = validity(plan)
        members = getattr(self.module, "EngineInvalidityDiagnostics", None)
        named = [] if members is None else [name for name, bit in members.__members__.items() if int(bit) & int(bits)]
        return f" ({', '.join(named)})" if named else "; see its log for the reason"


def _write(file: Path, content: bytes) -> None:
    """Replace a file of the cache atomically, so that no other process reads half of it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.{os.getpid()}.part")
    part.write_bytes(content)
    part.replace(file)


@cache
def tensorrt_logger(trt: Any) -> Any:
    """Return the process's only logger for a TensorRT module; TensorRT ignores a second one."""
    severity = trt.ILogger.Severity
    levels = {
        severity.INTERNAL_ERROR: logging.ERROR,
        severity.ERROR: logging.ERROR,
        severity.WARNING: logging.WARNING,
        severity.INFO: logging.INFO,
    }

    class PythonLogger(trt.ILogger):  # type: ignore[misc]
        """Forwards to Python's logging."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, level: Any, message: str) -> None:
            """Called by TensorRT."""
            tensorrt_log.log(levels.get(level, logging.DEBUG), "%s", message)

    return PythonLogger()
