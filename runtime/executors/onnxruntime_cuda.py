"""Loads an artifact for onnxruntime's CUDA provider: the CUDA executor, whose segments are ONNX files."""

from ingot.artifact import Artifact
from ingot.runtime.cuda.ort_segments import open_segments
from ingot.runtime.executor_loading import ExecutorOptions, LoadedExecutor
from ingot.runtime.executors.cuda import CudaExecutor


def load(artifact: Artifact, options: ExecutorOptions) -> LoadedExecutor:
    """The executor, on the first card that CUDA shows. Raises what `CudaExecutor` and `OrtSegments` do."""
    from ingot.runtime.cuda.driver import open_device  # needs cuda-bindings

    executor = CudaExecutor(artifact, open_device(), options, open_segments)
    return LoadedExecutor(executor, executor.max_sequences)
