"""Runtime: loads an artifact and generates tokens, on the CPU or on GPUs.

Options and what all executors share are at the top. Folders are layers, from text/ and kv/ over the executors in cpu/
and cuda/ to engine/, hosting/ and server/. Nothing of the compiler is here.
"""

from ingot.runtime.asking.outputs import Completion, RequestMetrics, RequestOutput, SampledToken, TokenLogprob
from ingot.runtime.asking.request_options import RequestOptions
from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.constraints.constraint import Constraint
from ingot.runtime.engine.engine import Engine
from ingot.runtime.engine.metrics_export import METRICS, Metric, prometheus_text
from ingot.runtime.executors import Executor, PipelinedExecutor, SubmittedStep
from ingot.runtime.forward_batch import ForwardBatch, SamplingArrays
from ingot.runtime.hosting.async_engine import AsyncEngine
from ingot.runtime.options import EngineOptions
from ingot.runtime.requests.beam_search import BeamParams
from ingot.runtime.speculation_options import SpeculationOptions
from ingot.runtime.steps.metrics import EngineMetrics, HistogramSnapshot
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
