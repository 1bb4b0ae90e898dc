"""onnxruntime's thread pool and scratch allocator: one of each for the whole process.

Sessions with pools of their own would each keep idle threads that spin: thirty segments ran thirty times slower on a
busy machine. onnxruntime lets the pool be made once; its size then stands until the process ends.
"""

import logging
import threading

import onnxruntime  # type: ignore[import-untyped]

from ingot import settings
from ingot.errors import EngineError

logger = logging.getLogger(__name__)

_lock = threading.Lock()
_size: int | None = None


def use_thread_pool(num_threads: int | None) -> int:
    """Make the process-wide pool on first use; return how many threads compute, the caller's included.

    None takes the pool as it is, else INGOT_THREADS, else the cores of the process. Raises EngineError for a number
    out of range, when a pool of another size exists already, or when something else made onnxruntime's pool.
    """
    global _size
    if num_threads is not None and not 1 <= num_threads <= settings.MAX_THREADS:
        raise EngineError(f"num_threads is {num_threads}; it must be from 1 to {settings.MAX_THREADS}")
    with _lock:
        if _size is None:
            _size = _make_pool(num_threads or settings.num_threads())
        if num_threads not in (None, _size):
            raise EngineError(
                f"num_threads is {num_threads}, but this process already computes with {_size}, and onnxruntime's "
                f"pool cannot be changed; ask for {_size} or none, or set INGOT_THREADS before the first engine"
            )
        return _size


def _make_pool(num_threads: int) -> int:
    try:
        onnxruntime.set_global_thread_pool_sizes(num_threads, 1)
    except Exception as error:
        raise EngineError(f"onnxruntime's process-wide thread pool cannot be made: {error}") from error
    memory = onnxruntime.OrtMemoryInfo(
        "Cpu", onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, onnxruntime.OrtMemType.DEFAULT
    )
    onnxruntime.create_and_register_allocator(memory, None)  # one arena for the segments' intermediate tensors
    logger.info("onnxruntime: one pool of %d threads for the process", num_threads)
    return num_threads
