"""Running small graphs in onnxruntime, for tests that compare numbers before and after a pass."""

from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime  # type: ignore[import-untyped]
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]


def session(model: ir.Model | str, num_threads: int = 1) -> onnxruntime.InferenceSession:
    """A session on the CPU; a model in memory must be small."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = num_threads
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    source = model if isinstance(model, str) else ir.to_proto(model).SerializeToString()
    return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def run(model: ir.Model, **feeds: NDArray[Any]) -> FloatArray:
    """The model's one output."""
    return np.asarray(session(model).run(None, feeds)[0])
