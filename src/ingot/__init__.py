"""Ingot compiles an LLM checkpoint into an artifact that proves itself, and runs it.

Example:
    import ingot
    engine = ingot.Engine.load("artifacts/demo")
    print(engine.generate("def read_file(path):").text)
"""

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from ingot.builder import BuildResult, build
    from ingot.errors import (
        AdapterError,
        ArtifactError,
        BuildError,
        CheckpointError,
        ConfigError,
        DataError,
        EngineBusy,
        EngineError,
        GateError,
        GateFailed,
        GateUndecided,
        IngotError,
        Overloaded,
        PassError,
        RecipeError,
        RequestError,
        RequestFailed,
        UsageError,
    )
    from ingot.runtime import (
        AsyncEngine,
        BeamParams,
        Completion,
        Constraint,
        Engine,
        EngineMetrics,
        EngineOptions,
        HistogramSnapshot,
        Message,
        RequestMetrics,
        RequestOptions,
        RequestOutput,
        SampledToken,
        SamplingParams,
        SpeculationOptions,
        Tokenizer,
        TokenLogprob,
        prometheus_text,
    )

# onnxruntime's wheels send telemetry unless this is set before they are imported, and write files for it.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

__all__ = [
    "AdapterError",
    "ArtifactError",
    "AsyncEngine",
    "BeamParams",
    "BuildError",
    "BuildResult",
    "CheckpointError",
    "Completion",
    "ConfigError",
    "Constraint",
    "DataError",
    "Engine",
    "EngineBusy",
    "EngineError",
    "EngineMetrics",
    "EngineOptions",
    "GateError",
    "GateFailed",
    "GateUndecided",
    "HistogramSnapshot",
    "IngotError",
    "Message",
    "Overloaded",
    "PassError",
    "RecipeError",
    "RequestError",
    "RequestFailed",
    "RequestMetrics",
    "RequestOptions",
    "RequestOutput",
    "SampledToken",
    "SamplingParams",
    "SpeculationOptions",
    "TokenLogprob",
    "Tokenizer",
    "UsageError",
    "__version__",
    "build",
    "prometheus_text",
]

_NAMES_OF = {
    "ingot.builder": ("BuildResult", "build"),
    "ingot.errors": (
        "AdapterError",
        "ArtifactError",
        "BuildError",
        "CheckpointError",
        "ConfigError",
        "DataError",
        "EngineBusy",
        "EngineError",
        "GateError",
        "GateFailed",
        "GateUndecided",
        "IngotError",
        "Overloaded",
        "PassError",
        "RecipeError",
        "RequestError",
        "RequestFailed",
        "UsageError",
    ),
    "ingot.runtime": (
        "AsyncEngine",
        "BeamParams",
        "Completion",
        "Constraint",
        "Engine",
        "EngineMetrics",
        "EngineOptions",
        "HistogramSnapshot",
        "Message",
        "RequestMetrics",
        "RequestOptions",
        "RequestOutput",
        "SampledToken",
        "SamplingParams",
        "SpeculationOptions",
        "TokenLogprob",
        "Tokenizer",
        "prometheus_text",
    ),
}
_HOME = {name: module for module, names in _NAMES_OF.items() for name in names}


def __getattr__(name: str) -> Any:
    """Find the public names on first use: `import ingot` alone loads neither engine nor compiler."""
    if name == "__version__":
        value: Any = import_module("ingot.version").package_version()
    elif name in _HOME:
        value = getattr(import_module(_HOME[name]), name)
    else:
        raise AttributeError(f"module 'ingot' has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__]
