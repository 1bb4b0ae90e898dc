"""Ingot compiles an LLM checkpoint into an artifact that proves itself, and runs it.

Example:
    import ingot
    engine = ingot.Engine.load("artifacts/demo")
    print(engine.generate("def read_file(path):").text)
"""

import os
from typing import TYPE_CHECKING

from ingot.lazy_names import lazy_names

# onnxruntime's wheels send telemetry unless this is set before they are imported, and write files for it.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

# `import ingot` alone loads neither engine nor compiler.
if TYPE_CHECKING:
    from ingot.builder import BuildResult as BuildResult
    from ingot.builder import build as build
    from ingot.errors import AdapterError as AdapterError
    from ingot.errors import ArtifactError as ArtifactError
    from ingot.errors import BuildError as BuildError
    from ingot.errors import CheckpointError as CheckpointError
    from ingot.errors import ConfigError as ConfigError
    from ingot.errors import DataError as DataError
    from ingot.errors import EngineBusy as EngineBusy
    from ingot.errors import EngineError as EngineError
    from ingot.errors import GateError as GateError
    from ingot.errors import GateFailed as GateFailed
    from ingot.errors import GateUndecided as GateUndecided
    from ingot.errors import IngotError as IngotError
    from ingot.errors import Overloaded as Overloaded
    from ingot.errors import PassError as PassError
    from ingot.errors import RecipeError as RecipeError
    from ingot.errors import RequestError as RequestError
    from ingot.errors import RequestFailed as RequestFailed
    from ingot.errors import UsageError as UsageError
    from ingot.runtime import AsyncEngine as AsyncEngine
    from ingot.runtime import BeamParams as BeamParams
    from ingot.runtime import Completion as Completion
    from ingot.runtime import Constraint as Constraint
    from ingot.runtime import Engine as Engine
    from ingot.runtime import EngineMetrics as EngineMetrics
    from ingot.runtime import EngineOptions as EngineOptions
    from ingot.runtime import HistogramSnapshot as HistogramSnapshot
    from ingot.runtime import Message as Message
    from ingot.runtime import RequestMetrics as RequestMetrics
    from ingot.runtime import RequestOptions as RequestOptions
    from ingot.runtime import RequestOutput as RequestOutput
    from ingot.runtime import SampledToken as SampledToken
    from ingot.runtime import SamplingParams as SamplingParams
    from ingot.runtime import SpeculationOptions as SpeculationOptions
    from ingot.runtime import Tokenizer as Tokenizer
    from ingot.runtime import TokenLogprob as TokenLogprob
    from ingot.runtime import prometheus_text as prometheus_text
    from ingot.version import __version__ as __version__
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__)
