"""Runtime: loads an artifact and generates tokens, on the CPU or on GPUs.

Options and what all executors share are at the top. Folders are layers, from text/ and kv/ over the executors in cpu/
and cuda/ to engine/, hosting/ and server/. Nothing of the compiler is here.
The public names are found on first use, so that a command's help reads declared options without loading the engine.
"""

from typing import TYPE_CHECKING

from ingot.lazy_names import lazy_names

if TYPE_CHECKING:
    from ingot.runtime.asking.outputs import Completion as Completion
    from ingot.runtime.asking.outputs import RequestMetrics as RequestMetrics
    from ingot.runtime.asking.outputs import RequestOutput as RequestOutput
    from ingot.runtime.asking.outputs import SampledToken as SampledToken
    from ingot.runtime.asking.outputs import TokenLogprob as TokenLogprob
    from ingot.runtime.asking.request_options import RequestOptions as RequestOptions
    from ingot.runtime.asking.sampling_params import SamplingParams as SamplingParams
    from ingot.runtime.constraints.constraint import Constraint as Constraint
    from ingot.runtime.engine.engine import Engine as Engine
    from ingot.runtime.engine.metrics_export import METRICS as METRICS
    from ingot.runtime.engine.metrics_export import prometheus_text as prometheus_text
    from ingot.runtime.executors import Executor as Executor
    from ingot.runtime.executors import PipelinedExecutor as PipelinedExecutor
    from ingot.runtime.executors import SubmittedStep as SubmittedStep
    from ingot.runtime.forward_batch import ForwardBatch as ForwardBatch
    from ingot.runtime.forward_batch import SamplingArrays as SamplingArrays
    from ingot.runtime.hosting.async_engine import AsyncEngine as AsyncEngine
    from ingot.runtime.metric_rows import Metric as Metric
    from ingot.runtime.options import EngineOptions as EngineOptions
    from ingot.runtime.requests.beam_search import BeamParams as BeamParams
    from ingot.runtime.speculation_options import SpeculationOptions as SpeculationOptions
    from ingot.runtime.steps.metrics import EngineMetrics as EngineMetrics
    from ingot.runtime.steps.metrics import HistogramSnapshot as HistogramSnapshot
    from ingot.runtime.text.messages import Message as Message
    from ingot.runtime.text.tokenizer import Tokenizer as Tokenizer
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__)
