"""TensorRT at run time: tensorrt_rtx or tensorrt, whichever an artifact's plans are of, in exactly their version.

Names that only one of the two has are asked for where they are used: runtime caches and kernel specialization are
TensorRT-RTX's, which compiles a plan's kernels on the card.

TensorRT's log in Python's: one logger a process, for TensorRT ignores a second.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ingot.errors import ArtifactError, EngineError

_TENSORRT_LOG = logging.getLogger("ingot.tensorrt")
_LOGGERS: dict[str, Any] = {}


def tensorrt_logger(trt: Any) -> Any:
    """The process's logger for a TensorRT module; writes to `ingot.tensorrt`."""
    if trt.__name__ not in _LOGGERS:
        _LOGGERS[trt.__name__] = _make_logger(trt)
    return _LOGGERS[trt.__name__]


def _make_logger(trt: Any) -> Any:
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
            _TENSORRT_LOG.log(levels.get(level, logging.DEBUG), "%s", message)

    return PythonLogger()


_LOG = logging.getLogger(__name__)
_MODULES = {"tensorrt-rtx": "tensorrt_rtx", "tensorrt": "tensorrt"}


@dataclass
class PlanLibrary:
    """A module, its runtime, and the cache of what it compiles."""

    name: str
    version: str
    module: Any = field(repr=False)
    runtime: Any = field(repr=False)
    compiled: bool = False  # since what was compiled was kept
    _cache: Any = None
    _file: Path | None = None

    def engine(self, plan: bytes, file: str) -> Any:
        """The engine of a plan. EngineError with what TensorRT says of a plan that it does not take."""
        engine = self.runtime.deserialize_cuda_engine(plan)
        if engine is None:
            raise EngineError(f"{file}: {self.name} {self.version} does not take the plan{self._diagnosis(plan)}")
        return engine

    def make_context(self, engine: Any) -> Any:
        """A context without memory of its own, its kernels compiled for the shapes that it is given."""
        trt, config = self.module, engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        if hasattr(trt, "DynamicShapesKernelSpecializationStrategy"):
            eager = trt.DynamicShapesKernelSpecializationStrategy.EAGER  # not while a graph is captured
            config.dynamic_shapes_kernel_specialization_strategy = eager
            self._share_cache(config)
        return engine.create_execution_context(config)

    def recall(self, file: Path) -> None:
        """Where compiled kernels are kept from start to start: contexts made from now on begin with them."""
        self._file = file

    def keep(self) -> None:
        """Write down what was compiled since it was last kept."""
        if self.compiled and self._cache is not None and self._file is not None:
            _write(self._file, bytes(self._cache.serialize()))
        self.compiled = False

    def _share_cache(self, config: Any) -> None:
        if self._cache is None:
            self._cache = config.create_runtime_cache()
            if self._file is not None and self._file.is_file():
                taken = self._cache.deserialize(self._file.read_bytes())
                _LOG.info("compiled plans of %s: %s", self._file, "taken" if taken else "of another driver or card")
        config.set_runtime_cache(self._cache)

    def _diagnosis(self, plan: bytes) -> str:
        ask = getattr(self.runtime, "get_engine_validity", None)
        if ask is None:
            return "; its log says why"
        _, bits = ask(plan)
        members = getattr(self.module, "EngineInvalidityDiagnostics", None)
        named = [] if members is None else [name for name, bit in members.__members__.items() if int(bit) & int(bits)]
        return f" ({', '.join(named)})" if named else "; its log says why"


def load_plan_library(name: str, version: str, load: Callable[[str], Any]) -> PlanLibrary:
    """The library of that name. EngineError where it is missing or of another version; ArtifactError for no such."""
    if name not in _MODULES:
        raise ArtifactError(f"the plans are of {name!r}, which this Ingot does not know; build the artifact again")
    try:
        module = load(_MODULES[name])
    except ImportError as error:
        raise EngineError(
            f"running TensorRT plans needs {name} {version}: pip install 'ingot[tensorrt]' {name}=={version}"
        ) from error
    installed = str(module.__version__)
    if installed != version:
        raise EngineError(
            f"the plans are of {name} {version}, and {installed} is installed: pip install {name}=={version}, or build "
            "the artifact again"
        )
    runtime = module.Runtime(tensorrt_logger(module))
    if runtime is None:
        raise EngineError(f"{name} {version} cannot start; its log says why")
    return PlanLibrary(name, version, module, runtime)


def _write(file: Path, content: bytes) -> None:
    """Replace a file of the cache at once, so that no other process reads half of it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.{os.getpid()}.part")
    part.write_bytes(content)
    part.replace(file)
