"""Runtime: loads an artifact and generates tokens, on the CPU or on GPUs.

The engine and everything that all executors share are here, executors in cpu/ and cuda/. Nothing of the compiler is.
"""

from ingot.runtime.async_engine import AsyncEngine
from ingot.runtime.beam_search import BeamParams
from ingot.runtime.constraints.constraint import Constraint
from ingot.runtime.engine import Engine
from ingot.runtime.executors import Executor, PipelinedExecutor, SubmittedStep
from ingot.runtime.metrics import EngineMetrics, HistogramSnapshot
from ingot.runtime.metrics_export import METRICS, Metric, prometheus_text
from ingot.runtime.options import EngineOptions
from ingot.runtime.outputs import Completion, RequestMetrics, RequestOutput
from ingot.runtime.request_options import RequestOptions
from ingot.runtime.sampler import SampledToken, SamplingArrays, TokenLogprob
from ingot.runtime.sampling import SamplingParams
from ingot.runtime.speculation.options import SpeculationOptions
from ingot.runtime.steps.batch import ForwardBatch
from ingot.runtime.text.messages import Message
from ingot.runtime.text.tokenizer import Tokenizer

__all__ = [
    "METRICS",
    "AsyncEngine",
    "BeamParams",
    "Completion",
    "Constraint",
    "Engine",
    "EngineMetrics",
    "EngineOptions",
    "Executor",
    "ForwardBatch",
    "HistogramSnapshot",
    "Message",
    "Metric",
    "PipelinedExecutor",
    "RequestMetrics",
    "RequestOptions",
    "RequestOutput",
    "SampledToken",
    "SamplingArrays",
    "SamplingParams",
    "SpeculationOptions",
    "SubmittedStep",
    "TokenLogprob",
    "Tokenizer",
    "prometheus_text",
]
