"""Plain onnxruntime sessions in a process that has made Ingot's thread pool: they must not have a pool of their own."""

from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime  # type: ignore[import-untyped]
from numpy.typing import NDArray

from ingot.runtime.cpu.segment_runner import session_options, use_thread_pool

Level = onnxruntime.GraphOptimizationLevel


def plain_session(model: ir.Model | str, level: int = Level.ORT_ENABLE_ALL) -> onnxruntime.InferenceSession:
    """A session on the process's pool, for a file or a model in memory."""
    use_thread_pool(None)
    options = session_options()
    options.graph_optimization_level = level
    source = model if isinstance(model, str) else ir.to_proto(model).SerializeToString()
    return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def run(model: ir.Model, **feeds: NDArray[Any]) -> NDArray[np.float32]:
    """The one output of a small model."""
    return np.asarray(plain_session(model).run(None, feeds)[0])
