"""One ONNX segment in an onnxruntime session, bound to the program's buffers without copies.

Weights are external data that onnxruntime maps into memory. A binding is made once per row count and kept: a step then
costs one call into onnxruntime, about 7 us.

Does onnxruntime multiply uint8 by int8 exactly on this CPU?

x86 CPUs without VNNI add pairs of such products in 16 bits, which saturate: 255 * 127 + 255 * 127 comes out as 32767.
onnxruntime can compute with unsigned weights there, exactly and more slowly; elsewhere that would only cost speed. So
one product is computed to see. Its model is written byte by byte here (onnx.proto: tags of ModelProto, GraphProto,
NodeProto, ValueInfoProto), because the runtime does without the package onnx.

onnxruntime's thread pool and scratch allocator: one of each for the whole process.

Sessions with pools of their own would each keep idle threads that spin: thirty segments ran thirty times slower on a
busy machine. onnxruntime lets the pool be made once; its size then stands until the process ends.
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


PRECISION_OPTION = "session.x64quantprecision"

_UINT8, _INT8, _INT32 = 2, 3, 6  # TensorProto.DataType
_WIDTH = 16
_IR_VERSION, _OPSET = 10, 21


@cache
def products_saturate() -> bool:
    """Whether 16 products of the largest codes, summed up, are not what they should be."""
    options = onnxruntime.SessionOptions()
    options.use_per_session_threads = False
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(product_model(), options, providers=["CPUExecutionProvider"])
    largest, weights = np.full((1, _WIDTH), 255, np.uint8), np.full((_WIDTH, _WIDTH), 127, np.int8)
    (found,) = session.run(None, {"a": largest, "b": weights})
    return bool((found != _WIDTH * 255 * 127).any())


def product_model() -> bytes:
    """y [1, 16] int32 = MatMulInteger(a [1, 16] uint8, b [16, 16] int8) as an ONNX file."""
    node = _text(1, "a") + _text(1, "b") + _text(2, "y") + _text(4, "MatMulInteger")
    a, b = _value("a", _UINT8, (1, _WIDTH)), _value("b", _INT8, (_WIDTH, _WIDTH))
    graph = _message(1, node) + _text(2, "product") + _message(11, a) + _message(11, b)
    graph += _message(12, _value("y", _INT32, (1, _WIDTH)))
    return _number(1, _IR_VERSION) + _message(7, graph) + _message(8, _text(1, "") + _number(2, _OPSET))


def _value(name: str, dtype: int, shape: tuple[int, ...]) -> bytes:
    dimensions = b"".join(_message(1, _number(1, size)) for size in shape)
    return _text(1, name) + _message(2, _message(1, _number(1, dtype) + _message(2, dimensions)))


def _number(tag: int, value: int) -> bytes:
    """A varint below 128."""
    return bytes((tag << 3, value))


def _text(tag: int, value: str) -> bytes:
    return _message(tag, value.encode())


def _message(tag: int, content: bytes) -> bytes:
    """A field with its length, of up to 14 bits."""
    size = len(content)
    length = bytes((size,)) if size < 128 else bytes((size & 127 | 128, size >> 7))
    return bytes((tag << 3 | 2,)) + length + content


_KEPT_BINDINGS = 64
_FATAL_ONLY = 4


class SegmentRunner:
    """Runs one segment. Raises EngineError, naming the segment, when onnxruntime refuses the file."""

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
        """Return the call that runs the segment on the first `tokens` rows, and `logits` rows of wanted logits."""
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
        # The session behind onnxruntime's Python wrapper: the wrapper's checks cost more than a small segment.
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
                f"{file}: reads {inputs} and makes {outputs}, but the manifest says {sorted(self.step.inputs)} "
                f"and {sorted(self.step.outputs)}; build the artifact again"
            )


def session_options() -> onnxruntime.SessionOptions:
    """Options of every segment's session: the process's pool and arena, no messages on stderr."""
    options = onnxruntime.SessionOptions()
    options.use_per_session_threads = False
    options.add_session_config_entry("session.use_env_allocators", "1")
    if products_saturate():
        options.add_session_config_entry(PRECISION_OPTION, "1")
    options.log_severity_level = _FATAL_ONLY  # errors come as exceptions; nothing is printed beside them
    return options
