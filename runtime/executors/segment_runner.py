"""One ONNX segment in an onnxruntime session, bound to the program's buffers without copies.

Weights are external data that onnxruntime maps into memory. A binding is made once per row count and kept: a step then
costs one call into onnxruntime, about 7 us.
"""

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path

import onnxruntime  # type: ignore[import-untyped]

from ingot.artifact import SegmentStep, ValueFacts
from ingot.errors import EngineError
from ingot.runtime.executors.buffers import ValueBuffers
from ingot.runtime.executors.integer_products import PRECISION_OPTION, products_saturate

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
