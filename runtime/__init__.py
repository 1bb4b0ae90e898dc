"""Runtime: artifact -> tokens. Imports nothing of the compiler."""

from ingot.runtime.async_engine import AsyncEngine
from ingot.runtime.batch import Executor, ForwardBatch, PipelinedExecutor, SubmittedStep, TokenDraws
from ingot.runtime.engine import Engine
from ingot.runtime.outputs import Completion, EngineMetrics, RequestMetrics, RequestOutput
from ingot.runtime.sampler import SampledToken, TokenLogprob
from ingot.runtime.sampling import SamplingParams
from ingot.runtime.tokenizer import Tokenizer

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
    "SamplingParams",
    "SubmittedStep",
    "TokenDraws",
    "TokenLogprob",
    "Tokenizer",
]
