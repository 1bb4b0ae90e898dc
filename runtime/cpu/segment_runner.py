"""One ONNX segment in an onnxruntime session, bound to the program's buffers without copies.

Weights are external data that onnxruntime maps into memory. A binding is made once per row count and cached: a step
then costs one call into onnxruntime, about 7 us.

All sessions of a process share one thread pool and one scratch allocator: with pools of their own, thirty segments ran
thirty times slower on a busy machine, because idle threads spin. onnxruntime fixes the pool's size when it is made.

x86 CPUs without VNNI add pairs of uint8 x int8 terms in 16 bits, which saturate: 255 * 127 + 255 * 127 gives 32767.
There onnxruntime can compute with unsigned weights, which is exact and slower. `integer_matmuls_saturate` runs
integer_matmul.onnx once to find out.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import numpy as np
import onnxruntime  # type: ignore[import-untyped]

from ingot import settings
from ingot.artifact import SegmentStep, ValueFacts
from ingot.errors import EngineError
from ingot.runtime.cpu.buffers import ValueBuffers

_log = logging.getLogger(__name__)

INTEGER_MATMUL = Path(__file__).with_name("integer_matmul.onnx")
"""y [1, 16] int32 = MatMulInteger(a [1, 16] uint8, b [16, 16] int8); see test_segment_runner.py."""

PRECISION_OPTION = "session.x64quantprecision"
_KEPT_BINDINGS = 64
_FATAL_ONLY = 4  # errors are raised as exceptions; nothing is printed

_lock = threading.Lock()
_pool_threads: int | None = None  # of the process-wide pool, once it is made


class SegmentRunner:
    """Runs one segment. Raises EngineError, naming the segment, when onnxruntime cannot load the file."""

    def __init__(self, file: Path, step: SegmentStep, values: dict[str, ValueFacts], buffers: ValueBuffers) -> None:
        self.step = step
        self._values = values
        self._buffers = buffers
        self._uses_logits = any(values[name].rows == "logits" for name in (*step.inputs, *step.outputs))
        self._bound: OrderedDict[tuple[int, int], Callable[[], None]] = OrderedDict()
        try:
            self._session = onnxruntime.InferenceSession(
                str(file), session_options(), providers=["CPUExecutionProvider"], enable_fallback=0
            )
        except Exception as error:
            raise EngineError(f"{file}: onnxruntime cannot load this segment: {error}") from error
        self._check_names(file)

    def bind(self, tokens: int, logits: int) -> Callable[[], None]:
        """Return the call that runs the segment on the first `tokens` token rows and `logits` logit rows."""
        key = (tokens, logits if self._uses_logits else 0)
        call = self._bound.get(key)
        if call is None:
            call = self._bound[key] = self._make_call(tokens, logits)
            if len(self._bound) > _KEPT_BINDINGS:
                self._bound.popitem(last=False)
        self._bound.move_to_end(key)
        return call

    def forget_bindings(self) -> None:
        """Drop bindings to buffers that moved."""
        if self._uses_logits:
            self._bound.clear()

    def _make_call(self, tokens: int, logits: int) -> Callable[[], None]:
        binding = self._session.io_binding()
        for bind, names in ((binding.bind_input, self.step.inputs), (binding.bind_output, self.step.outputs)):
            for name in names:
                buffer = self._buffers[name]
                rows = tokens if self._values[name].rows == "tokens" else logits
                bind(name, "cpu", 0, buffer.dtype.type, [rows, *buffer.shape[1:]], buffer.ctypes.data)
        # The C++ session under the Python wrapper: the wrapper's checks cost more than a small segment.
        run = partial(self._session._sess.run_with_iobinding, binding._iobinding, None)

        def call() -> None:
            try:
                run()
            except Exception as error:
                raise EngineError(f"{self.step.file}: onnxruntime failed: {error}") from error

        return call

    def _check_names(self, file: Path) -> None:
        inputs = sorted(value.name for value in self._session.get_inputs())
        outputs = sorted(value.name for value in self._session.get_outputs())
        if inputs != sorted(self.step.inputs) or outputs != sorted(self.step.outputs):
            raise EngineError(
                f"{file}: reads {inputs} and writes {outputs}, but the manifest says {sorted(self.step.inputs)} "
                f"and {sorted(self.step.outputs)}; build the artifact again"
            )


def session_options() -> onnxruntime.SessionOptions:
    """Options of every segment's session: the process's pool and allocator, nothing on stderr."""
    options = onnxruntime.SessionOptions()
    options.use_per_session_threads = False
    options.add_session_config_entry("session.use_env_allocators", "1")
    if integer_matmuls_saturate():
        options.add_session_config_entry(PRECISION_OPTION, "1")
    options.log_severity_level = _FATAL_ONLY
    return options


@cache
def integer_matmuls_saturate() -> bool:
    """Whether a sum of 16 terms of the largest codes is wrong on this CPU."""
    options = onnxruntime.SessionOptions()
    options.use_per_session_threads = False
    options.log_severity_level = _FATAL_ONLY
    session = onnxruntime.InferenceSession(str(INTEGER_MATMUL), options, providers=["CPUExecutionProvider"])
    codes, weights = np.full((1, 16), 255, np.uint8), np.full((16, 16), 127, np.int8)
    (found,) = session.run(None, {"a": codes, "b": weights})
    return bool((found != 16 * 255 * 127).any())


def use_thread_pool(num_threads: int | None) -> int:
    """Make the process-wide pool on first use; return its number of threads, the caller's included.

    None means the existing pool's, else INGOT_THREADS, else one per core. Raises EngineError for a number out of range,
    when a pool of another size exists already, or when other code made onnxruntime's pool.
    """
    global _pool_threads
    if num_threads is not None and not 1 <= num_threads <= settings.MAX_THREADS:
        raise EngineError(f"num_threads is {num_threads}; it must be from 1 to {settings.MAX_THREADS}")
    with _lock:
        if _pool_threads is None:
            _pool_threads = _make_pool(num_threads or settings.num_threads())
        if num_threads not in (None, _pool_threads):
            raise EngineError(
                f"num_threads is {num_threads}, but this process already computes with {_pool_threads} threads, and "
                f"onnxruntime's pool cannot be changed; ask for {_pool_threads} or leave it out, or set INGOT_THREADS "
                "before the first engine"
            )
        return _pool_threads


def _make_pool(num_threads: int) -> int:
    try:
        onnxruntime.set_global_thread_pool_sizes(num_threads, 1)
    except Exception as error:
        raise EngineError(f"onnxruntime's process-wide thread pool cannot be made: {error}") from error
    memory = onnxruntime.OrtMemoryInfo(
        "Cpu", onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, onnxruntime.OrtMemType.DEFAULT
    )
    onnxruntime.create_and_register_allocator(memory, None)  # one arena for the segments' intermediate tensors
    _log.info("onnxruntime: one pool of %d threads for the process", num_threads)
    return num_threads
