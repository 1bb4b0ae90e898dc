"""The TensorRT module that builds plans: tensorrt_rtx, which needs no card, or tensorrt where only that is installed.

Both have the same names for what is used here. TensorRT-RTX alone knows compute capabilities: its plans are portable
between cards and are made for the ones that are listed; those of `tensorrt` are for the card that they are built on.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

from ingot.errors import BuildError

LibraryName = Literal["tensorrt-rtx", "tensorrt"]
MODULES: dict[LibraryName, str] = {"tensorrt-rtx": "tensorrt_rtx", "tensorrt": "tensorrt"}
EXTRA = "pip install 'ingot[tensorrt]'"

_log = logging.getLogger("ingot.tensorrt")


@dataclass(frozen=True)
class Library:
    """A module with its name and version."""

    module: Any
    name: LibraryName
    version: str

    @property
    def is_rtx(self) -> bool:
        """Whether plans are built for listed SMs, on a machine that may have no card."""
        return hasattr(self.module, "ComputeCapability")

    @property
    def sms(self) -> tuple[int, ...]:
        """SMs that plans can be built for; empty where that is the card at hand alone."""
        if not self.is_rtx:
            return ()
        names = (name for name in self.module.ComputeCapability.__members__ if name.startswith("SM"))
        return tuple(sorted(int(name.removeprefix("SM")) for name in names))


def load_library(load: Callable[[str], Any] = import_module) -> Library:
    """TensorRT-RTX, or else TensorRT; BuildError that names the extra where neither is installed."""
    for name, module in MODULES.items():
        try:
            loaded = load(module)
        except ImportError:
            continue
        return Library(loaded, name, str(loaded.__version__))
    raise BuildError(f"building for TensorRT needs its Python package: {EXTRA}")


_LOGGERS: dict[str, Any] = {}


def plan_logger(library: Library) -> Any:
    """The process's one TensorRT logger, which writes into Python's `ingot.tensorrt`: TensorRT ignores a second."""
    if library.name not in _LOGGERS:
        _LOGGERS[library.name] = _make_logger(library.module)
    return _LOGGERS[library.name]


def _make_logger(trt: Any) -> Any:
    severity = trt.ILogger.Severity
    levels = {
        severity.INTERNAL_ERROR: logging.ERROR,
        severity.ERROR: logging.ERROR,
        severity.WARNING: logging.WARNING,
        severity.INFO: logging.INFO,
    }

    class PlanLogger(trt.ILogger):  # type: ignore[misc]
        """Forwards to Python's logging."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, level: Any, message: str) -> None:
            """Called by TensorRT."""
            _log.log(levels.get(level, logging.DEBUG), "%s", message)

    return PlanLogger()
