"""Loads an artifact of TensorRT plans: the CUDA executor, whose segments are plans."""

from ingot.artifact import Artifact
from ingot.runtime.cuda.plans import Plans
from ingot.runtime.executor_loading import ExecutorOptions, LoadedExecutor
from ingot.runtime.executors import cuda


def load(artifact: Artifact, options: ExecutorOptions) -> LoadedExecutor:
    """The executor, on the first card that CUDA shows. Raises what `CudaExecutor` and `Plans.open` do."""
    return cuda.load(artifact, options, Plans.open)
