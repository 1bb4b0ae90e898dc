"""Ingot compiles an LLM checkpoint into an artifact that proves itself, and runs it.

Example:
    import ingot
    engine = ingot.Engine.load("artifacts/demo")
    print(engine.generate("def read_file(path):").text)
"""

import os
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ingot.builder import build as build
    from ingot.runtime import AsyncEngine as AsyncEngine
    from ingot.runtime import Engine as Engine
    from ingot.runtime import SamplingParams as SamplingParams

# onnxruntime's wheels send telemetry unless this is set before they are imported, and write files for it.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

try:
    __version__ = version("ingot")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0.0.0"

__all__ = ["AsyncEngine", "Engine", "SamplingParams", "__version__", "build"]

_HOME = {
    "AsyncEngine": "ingot.runtime",
    "Engine": "ingot.runtime",
    "SamplingParams": "ingot.runtime",
    "build": "ingot.builder",
}


def __getattr__(name: str) -> Any:
    """Import the public names on first use: `import ingot` alone loads neither engine nor compiler."""
    if name not in _HOME:
        raise AttributeError(f"module 'ingot' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
