"""Runtime: loads an artifact and generates tokens, on the CPU or on GPUs.

The engine and everything that all executors share are here, executors in cpu/ and cuda/. Nothing of the compiler is.
The public names are found on first use, so that a command's help reads declared options without loading the engine.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ingot.runtime.async_engine import AsyncEngine as AsyncEngine
    from ingot.runtime.beam_search import BeamParams as BeamParams
    from ingot.runtime.constraints.constraint import Constraint as Constraint
    from ingot.runtime.engine import Engine as Engine
    from ingot.runtime.executors import Executor as Executor
    from ingot.runtime.executors import PipelinedExecutor as PipelinedExecutor
    from ingot.runtime.executors import SubmittedStep as SubmittedStep
    from ingot.runtime.metrics import EngineMetrics as EngineMetrics
    from ingot.runtime.metrics import HistogramSnapshot as HistogramSnapshot
    from ingot.runtime.metrics_export import METRICS as METRICS
    from ingot.runtime.metrics_export import Metric as Metric
    from ingot.runtime.metrics_export import prometheus_text as prometheus_text
    from ingot.runtime.options import EngineOptions as EngineOptions
    from ingot.runtime.outputs import Completion as Completion
    from ingot.runtime.outputs import RequestMetrics as RequestMetrics
    from ingot.runtime.outputs import RequestOutput as RequestOutput
    from ingot.runtime.request_options import RequestOptions as RequestOptions
    from ingot.runtime.sampler import SampledToken as SampledToken
    from ingot.runtime.sampler import SamplingArrays as SamplingArrays
    from ingot.runtime.sampler import TokenLogprob as TokenLogprob
    from ingot.runtime.sampling import SamplingParams as SamplingParams
    from ingot.runtime.speculation.options import SpeculationOptions as SpeculationOptions
    from ingot.runtime.steps.batch import ForwardBatch as ForwardBatch
    from ingot.runtime.text.messages import Message as Message
    from ingot.runtime.text.tokenizer import Tokenizer as Tokenizer

_NAMES_OF = {
    "async_engine": ("AsyncEngine",),
    "beam_search": ("BeamParams",),
    "constraints.constraint": ("Constraint",),
    "engine": ("Engine",),
    "executors": ("Executor", "PipelinedExecutor", "SubmittedStep"),
    "metrics": ("EngineMetrics", "HistogramSnapshot"),
    "metrics_export": ("METRICS", "Metric", "prometheus_text"),
    "options": ("EngineOptions",),
    "outputs": ("Completion", "RequestMetrics", "RequestOutput"),
    "request_options": ("RequestOptions",),
    "sampler": ("SampledToken", "SamplingArrays", "TokenLogprob"),
    "sampling": ("SamplingParams",),
    "speculation.options": ("SpeculationOptions",),
    "steps.batch": ("ForwardBatch",),
    "text.messages": ("Message",),
    "text.tokenizer": ("Tokenizer",),
}
_HOME = {name: module for module, names in _NAMES_OF.items() for name in names}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    return found


def __dir__() -> list[str]:
    return [*__all__]
