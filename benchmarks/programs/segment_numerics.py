"""Run a lowered segment in onnxruntime on the CPU, and compare it with the IR in float32.

onnxruntime has no bfloat16 on CPUs. Such a segment runs in float32 with its weights rounded to bfloat16: that checks
the lowering, not the rounding of activations.
"""

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
import onnxruntime  # type: ignore[import-untyped]
from numpy.typing import NDArray

from ingot.passes.weights import apply_to_array
from ingot.pipeline.targets.segments.segment import Segment
from ingot.pipeline.targets.segments.segment_builder import SegmentWeight
from ingot.runtime.cpu.segment_runner import session_options, use_thread_pool

Float32Array = NDArray[np.float32]
_BFLOAT16 = ir.DataType.BFLOAT16


def lowered_outputs(segment: Segment, feeds: Mapping[str, NDArray[np.generic]]) -> dict[str, Float32Array]:
    """Outputs of the model that TensorRT gets, by the IR's names; `feeds` are by the IR's names, too."""
    model = bound_model(segment)
    types = {value.name: value.dtype for value in model.graph.inputs}
    given = {}
    for name, value in segment.inputs.items():
        dtype = types[name]
        assert dtype is not None
        given[name] = feeds[value.name or ""].astype(dtype.numpy())
    results = _session(model).run(None, given)
    names = (value.name or "" for value in segment.outputs.values())
    return {name: result.astype(np.float32) for name, result in zip(names, results, strict=True)}


def float32_outputs(segment: Segment, feeds: Mapping[str, NDArray[np.generic]]) -> dict[str, Float32Array]:
    """The same outputs computed from the IR before any lowering."""
    inputs, outputs = list(segment.inputs.values()), list(segment.outputs.values())
    graph = outputs[0].graph
    assert graph is not None
    part = ir.convenience.extract(graph, inputs, outputs)
    for value in part.initializers.values():
        value.const_value = _loaded(value)
    model = ir.Model(part, ir_version=segment.model.ir_version)
    given = {value.name or "": feeds[value.name or ""] for value in inputs}
    results = _session(model).run(None, given)
    return {value.name or "": result for value, result in zip(outputs, results, strict=True)}


def relative_errors(segment: Segment, feeds: Mapping[str, NDArray[np.generic]]) -> dict[str, float]:
    """The norm of the lowered outputs' error over the norm of the IR's, by the output's name."""
    lowered, exact = lowered_outputs(segment, feeds), float32_outputs(segment, feeds)
    return {name: float(np.linalg.norm(lowered[name] - y) / np.linalg.norm(y)) for name, y in exact.items()}


def random_feeds(segment: Segment, rows: int, seed: int = 0) -> dict[str, NDArray[np.generic]]:
    """Activations of unit size, and positions from 0."""
    rng = np.random.default_rng(seed)
    feeds: dict[str, NDArray[np.generic]] = {}
    for value in segment.inputs.values():
        assert value.shape is not None
        shape = (rows, *(int(str(size)) for size in list(value.shape)[1:]))
        is_float = value.dtype == ir.DataType.FLOAT
        feeds[value.name or ""] = rng.standard_normal(shape, np.float32) if is_float else np.arange(rows)
    return feeds


def bound_model(segment: Segment) -> ir.Model:
    """The segment with its weights as constants, its bfloat16 widened to float32."""
    model = segment.copied_model()
    graph = model.graph
    for value in list(graph.inputs):
        weight = segment.weights.get(value.name or "")
        if weight is not None:
            graph.inputs.remove(value)
            value.const_value = _tensor(weight)
            graph.register_initializer(value)
    for value in [*graph.initializers.values(), *graph.inputs, *(v for node in graph for v in node.outputs)]:
        _widen(value)
    return model


def _tensor(weight: SegmentWeight) -> ir.TensorProtocol:
    return ir.Tensor(np.ascontiguousarray(weight.make()).astype(weight.dtype.numpy()), dtype=weight.dtype)


def _loaded(value: ir.Value) -> ir.TensorProtocol | None:
    """The tensor in memory: onnxruntime refuses tensor files outside the model's folder."""
    tensor = value.const_value
    if isinstance(tensor, ir.ExternalTensor):
        return ir.Tensor(apply_to_array(tensor, np.array), dtype=tensor.dtype, name=value.name)
    return tensor


def _widen(value: ir.Value) -> None:
    if value.dtype != _BFLOAT16:
        return
    value.dtype = ir.DataType.FLOAT
    if value.const_value is not None:
        value.const_value = ir.Tensor(np.asarray(value.const_value.numpy()).astype(np.float32), name=value.name)


def _session(model: ir.Model) -> onnxruntime.InferenceSession:
    """A session without onnxruntime's optimizer, which would change how quantized matmuls are computed."""
    use_thread_pool(None)
    options = session_options()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    content = ir.to_proto(model).SerializeToString()
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
