"""Which executor runs an artifact: a table from the manifest's engine to the function that loads it.

To add an engine: a function `load(artifact, options) -> LoadedExecutor` in `executors/`, and its row here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module

from ingot.artifact import Artifact, EngineKind
from ingot.errors import EngineError, UsageError, one_of
from ingot.runtime.batch import Executor

EXECUTORS: Mapping[EngineKind, str] = {
    "cuda": "ingot.runtime.cuda.executor:load",
    "onnxruntime": "ingot.runtime.cpu.executor:load",
    "onnxruntime-cuda": "ingot.runtime.cuda.ort_segments:load",
    "tensorrt": "ingot.runtime.cuda.plans:load",
}

_LARGEST_LIMIT = 2**20  # of tokens or sequences in a step: what is made for that many still fits a memory


@dataclass(frozen=True)
class ExecutorOptions:
    """What the caller of `Engine.load` asked for; None: as the artifact, the memory and the machine suggest.

    UsageError for a limit that no engine can have.
    """

    kv_blocks: int | None = None
    kv_bytes: int | None = None
    max_batch_tokens: int | None = None
    max_sequences: int | None = None
    num_threads: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_batch_tokens", "max_sequences"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= _LARGEST_LIMIT:
                raise UsageError(f"{name} is {value}; it must be from 1 to {_LARGEST_LIMIT}")


@dataclass(frozen=True)
class LoadedExecutor:
    """An executor, and how many sequences one of its steps may have."""

    executor: Executor
    max_sequences: int


def load_executor(artifact: Artifact, options: ExecutorOptions) -> LoadedExecutor:
    """Make the artifact's executor. UsageError for a limit that it cannot have, EngineError when it cannot be made."""
    engine = artifact.manifest.engine
    if engine not in EXECUTORS:
        raise EngineError(
            f"{artifact.path}: is for the engine {engine!r}, which this Ingot cannot run; engines: {one_of(EXECUTORS)}"
        )
    module, _, name = EXECUTORS[engine].partition(":")
    loaded: LoadedExecutor = getattr(import_module(module), name)(artifact, options)
    return loaded
