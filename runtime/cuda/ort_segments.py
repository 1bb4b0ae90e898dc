"""Segments in onnxruntime's CUDA provider: on the program's own stream, bound to addresses on the GPU.

Each file gets a session and each call a binding, once: a call is then one call into onnxruntime, which queues kernels
on the stream and returns. Weights are ordinary inputs that stay in the program's weights, so sessions hold none.
onnxruntime allocates while it runs, and so these programs cannot be captured into CUDA graphs.

Nothing falls back to the CPU: a provider that does not load, or a node that it cannot run, is an error.
"""

import ctypes
import io
import logging
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ingot.artifact import Artifact
from ingot.artifact.programs.launch_program import SegmentCall
from ingot.errors import EngineError
from ingot.runtime.cuda import executor
from ingot.runtime.cuda.driver.device import Device, Queue, Stream
from ingot.runtime.cuda.executor import CudaExecutor
from ingot.runtime.options import EngineOptions
from ingot.version import install_command

_log = logging.getLogger(__name__)
_FATAL_ONLY = 4  # errors come as exceptions
_LIBRARIES = ("libonnxruntime_providers_shared.so", "libonnxruntime_providers_cuda.so")

# Triton's names of types -> ONNX's numbers.
_ONNX_TYPES = {"fp32": 1, "u8": 2, "i8": 3, "i32": 6, "i64": 7, "fp16": 10, "bf16": 16, "fp8e4nv": 17}


@dataclass(frozen=True)
class Provider:
    """An onnxruntime provider: its name, the kind of device memory it uses, its options for a stream."""

    name: str
    memory: str
    options: Callable[[Stream], Mapping[str, str]]


def _cuda_options(stream: Stream) -> Mapping[str, str]:
    """Options for the first visible GPU, as in driver.py: full float32, also in norms, and no spare memory."""
    return {
        "user_compute_stream": str(int(stream)),
        "arena_extend_strategy": "kSameAsRequested",
        "use_tf32": "0",
        "enable_skip_layer_norm_strict_mode": "1",
    }


CUDA = Provider("CUDAExecutionProvider", "cuda", _cuda_options)


def load(artifact: Artifact, options: EngineOptions) -> CudaExecutor:
    """Make the executor on the first visible GPU. Raises the errors of `CudaExecutor` and `OrtSegments`."""
    return executor.load_whole(artifact, options, open_segments)


def open_segments(artifact: Artifact, device: Device, stream: Stream) -> "OrtSegments":
    """Open the segments for `CudaExecutor`. EngineError when onnxruntime is installed without its CUDA provider."""
    return OrtSegments(artifact, stream)


class OrtSegments:
    """Runs an artifact's segments. Implements `programs.SegmentBinder`.

    EngineError, naming the file, when onnxruntime lacks the provider, cannot load it or the file, or when the provider
    cannot run all nodes. A call that onnxruntime refuses raises EngineError, naming its node.
    """

    def __init__(self, artifact: Artifact, stream: Stream, provider: Provider = CUDA) -> None:
        self._onnxruntime = _import_onnxruntime(provider)
        self._artifact, self._stream, self._provider = artifact, stream, provider
        self._sessions: dict[str, Any] = {}
        self._bound: dict[object, _BoundCall] = {}
        run_options = self._onnxruntime.RunOptions()
        run_options.add_run_config_entry(
            "disable_synchronize_execution_providers", "1"
        )  # the stream keeps work in order
        self._run_options = run_options

    def __call__(self, call: SegmentCall, addresses: Mapping[str, int]) -> Queue:
        """Bind a call to its addresses."""
        key = (call.file, tuple(call.shapes.items()), tuple(addresses.items()))
        if key not in self._bound:
            session = self._sessions.get(call.file) or self._load(call.file)
            self._bound[key] = _BoundCall(call, self._bind(session, call, addresses), self._stream)
        return self._bound[key]

    @property
    def version(self) -> str:
        """onnxruntime's version."""
        return f"onnxruntime {self._onnxruntime.__version__}"

    def close(self) -> None:
        """Drop sessions and bindings. Idempotent."""
        for bound in self._bound.values():
            bound.run = None
        self._bound.clear()
        self._sessions.clear()

    def _load(self, name: str) -> Any:
        file, provider = self._artifact.file(name), self._provider
        given = [(provider.name, dict(provider.options(self._stream)))]
        try:
            session = self._onnxruntime.InferenceSession(
                str(file), _session_options(self._onnxruntime), providers=given, enable_fallback=0
            )
        except Exception as error:
            raise EngineError(f"{file}: onnxruntime cannot load this segment: {error}") from error
        if provider.name not in session.get_providers():
            raise EngineError(_does_not_load(self._onnxruntime, provider))
        _require_all_nodes(session, file, provider)
        self._sessions[name] = session
        _log.debug("%s: loaded", file)
        return session

    def _bind(self, session: Any, call: SegmentCall, addresses: Mapping[str, int]) -> Callable[[], None]:
        inputs, outputs = session.get_inputs(), session.get_outputs()
        _require_names(call, [value.name for value in inputs], [value.name for value in outputs])
        symbols = {
            name: size
            for value in inputs
            for name, size in zip(value.shape, call.shapes[value.name], strict=True)
            if isinstance(name, str)
        }
        binding, memory = session.io_binding(), self._provider.memory
        for value in inputs:
            kind, shape = _ONNX_TYPES[call.inputs[value.name].type], list(call.shapes[value.name])
            binding.bind_input(value.name, memory, 0, kind, shape, addresses[value.name])
        for value in outputs:
            kind, shape = _ONNX_TYPES[call.outputs[value.name].type], [symbols.get(size, size) for size in value.shape]
            binding.bind_output(value.name, memory, 0, kind, shape, addresses[value.name])
        # The C++ session under the Python wrapper: the wrapper's checks cost more than a small segment.
        return partial(session._sess.run_with_iobinding, binding._iobinding, self._run_options)


@dataclass
class _BoundCall:
    """A call with its operands; `run` is None once the segments are closed."""

    call: SegmentCall
    run: Callable[[], None] | None
    stream: Stream

    def __call__(self, stream: Stream) -> None:
        assert stream is self.stream, "sessions run only on the stream that they were made for"
        assert self.run is not None, "the segments are closed"
        try:
            self.run()
        except Exception as error:
            raise EngineError(f"{self.call.node}: {self.call.file}: onnxruntime failed: {error}") from error


def _import_onnxruntime(provider: Provider) -> Any:
    import onnxruntime  # type: ignore[import-untyped]

    available = onnxruntime.get_available_providers()
    if provider.name not in available:
        raise EngineError(
            f"the artifact's segments need onnxruntime's {provider.name}, and the onnxruntime "
            f"{onnxruntime.__version__} that is installed has {', '.join(available)}; {install_command('ort-cuda')}, "
            "then pip install --force-reinstall --no-deps onnxruntime-gpu"
        )
    if provider is CUDA:
        said = io.StringIO()
        with redirect_stdout(said):  # it prints the libraries that it does not find
            onnxruntime.preload_dlls()  # loads the libraries of CUDA and cuDNN that pip installed
        if said.getvalue():
            _log.debug("onnxruntime.preload_dlls: %s", said.getvalue().strip())
    return onnxruntime


def _session_options(onnxruntime: Any) -> Any:
    from ingot.runtime.cpu.segment_runner import use_thread_pool

    use_thread_pool(None)
    options = onnxruntime.SessionOptions()
    options.use_per_session_threads = False  # onnxruntime requires all sessions of a process to agree
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    options.log_severity_level = _FATAL_ONLY
    return options


def _require_all_nodes(session: Any, file: Path, provider: Provider) -> None:
    elsewhere = [
        f"{node.name} ({node.op_type})"
        for part in session.get_provider_graph_assignment_info()
        if part.ep_name != provider.name
        for node in part.get_nodes()
    ]
    if elsewhere:
        shown = ", ".join(elsewhere[:5]) + (f" and {len(elsewhere) - 5} more" if len(elsewhere) > 5 else "")
        raise EngineError(
            f"{file}: onnxruntime's {provider.name} has no kernel for {shown}; build with another gpu.activations, "
            "omit the pass that made the operator, or install another onnxruntime-gpu"
        )


def _require_names(call: SegmentCall, inputs: list[str], outputs: list[str]) -> None:
    if sorted(inputs) != sorted(call.inputs) or sorted(outputs) != sorted(call.outputs):
        raise EngineError(
            f"{call.file}: reads {sorted(inputs)} and makes {sorted(outputs)}, but the program gives "
            f"{sorted(call.inputs)} and takes {sorted(call.outputs)}; build the artifact again"
        )


def _does_not_load(onnxruntime: Any, provider: Provider) -> str:
    """Say why the provider did not load: onnxruntime only writes the reason to stderr, and goes on without it."""
    folder, reason = Path(onnxruntime.__file__).parent / "capi", "see onnxruntime's message on stderr"
    for name in _LIBRARIES:
        try:
            ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            reason = str(error)
            break
    return (
        f"onnxruntime {onnxruntime.__version__} cannot load its {provider.name}: {reason}; it needs a driver and "
        f"libraries of CUDA {onnxruntime.cuda_version}: pip install 'onnxruntime-gpu[cuda,cudnn]'"
    )
