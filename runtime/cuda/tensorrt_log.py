"""TensorRT's log in Python's: one logger a process, for TensorRT ignores a second."""

import logging
from typing import Any

_LOG = logging.getLogger("ingot.tensorrt")
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
            _LOG.log(levels.get(level, logging.DEBUG), "%s", message)

    return PythonLogger()
