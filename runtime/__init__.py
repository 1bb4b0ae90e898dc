"""Runtime: artifact -> tokens. Imports nothing of the compiler."""

from ingot.runtime.async_engine import AsyncEngine
from ingot.runtime.batch import ForwardBatch
from ingot.runtime.engine import Engine
from ingot.runtime.executors import Executor, PipelinedExecutor, SubmittedStep
from ingot.runtime.outputs import Completion, EngineMetrics, RequestMetrics, RequestOutput
from ingot.runtime.sampler import SampledToken, SamplingArrays, TokenLogprob
from ingot.runtime.sampling import SamplingParams
from ingot.runtime.text.tokenizer import Tokenizer

__all__ = [
    "AsyncEngine",
    "Completion",
    "Engine",
    "EngineMetrics",
    "Executor",
    "ForwardBatch",
    "PipelinedExecutor",
    "RequestMetrics",
    "RequestOutput",
    "SampledToken",
    "SamplingArrays",
    "SamplingParams",
    "SubmittedStep",
    "TokenLogprob",
    "Tokenizer",
]
