"""Segments of a launch program as TensorRT plans: loaded once, run on the program's stream.

    plan (file) ─► engine ─► a context for every captured shape, one for all others ─► a call with addresses ─► stream

Contexts share one allocation for intermediate values, because calls run in order on one stream; each call gives its
context the addresses of its layer. A context whose shapes change invalidates the graphs captured from it, so every
captured shape has one of its own (TensorRT's developer guide, CUDA graphs). Calls that no graph captures share one, and
give it their profile and shapes, too.

TensorRT-RTX compiles a plan's kernels on the GPU, when a context is made and when it first runs: the loader rehearses
every call before it sizes the KV pool or captures a graph. Compiled kernels are kept in Ingot's cache folder for the
next start.

Only this module imports TensorRT, and only when plans are loaded.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ingot.artifact import Artifact
from ingot.artifact.programs.launch_program import SegmentCall
from ingot.artifact.programs.plan_facts import (
    HEADER_BYTES,
    PLANS_FILE,
    PlanFacts,
    ProgramPlans,
    is_rtx_plan,
    read_plan_header,
)
from ingot.errors import ArtifactError, EngineError
from ingot.runtime.cuda import executor
from ingot.runtime.cuda.driver.device import Device, Queue, Stream
from ingot.runtime.cuda.executor import CudaExecutor
from ingot.runtime.cuda.plan_library import PlanLibrary, load_plan_library
from ingot.runtime.options import EngineOptions
from ingot.settings import cache_dir
from ingot.sizes import format_bytes

_log = logging.getLogger(__name__)
_Shapes = tuple[tuple[str, tuple[int, ...]], ...]


def load(artifact: Artifact, options: EngineOptions) -> CudaExecutor:
    """Make the executor of TensorRT plans on the first visible GPU.

    Raises the errors of `CudaExecutor` and `Plans.open`.
    """
    return executor.load_whole(artifact, options, Plans.open)


def read_plan_facts(artifact: Artifact) -> tuple[PlanFacts, ...]:
    """Read the build's record of the artifact's plans. ArtifactError when it is missing or invalid."""
    file: Path = artifact.file(PLANS_FILE)
    try:
        return ProgramPlans.model_validate_json(file.read_bytes()).plans
    except ValidationError as error:
        raise ArtifactError(f"{file}: {error.errors()[0]['msg']}; build the artifact again") from error


@dataclass
class Plans:
    """The plans of a program on a device, run on one stream. Implements `SegmentBinder`; made by `open`."""

    device: Device
    stream: Stream
    library: PlanLibrary
    engines: dict[str, Any]
    scratch: tuple[int, int]  # address and bytes of the memory that contexts share
    contexts: dict[tuple[object, ...], "_Context"] = field(default_factory=dict)
    rehearsed: set[tuple[str, _Shapes]] = field(default_factory=set)

    @classmethod
    def open(
        cls, artifact: Artifact, device: Device, stream: Stream, load: Callable[[str], Any] = import_module
    ) -> "Plans":
        """Load all plans onto the device.

        EngineError when TensorRT is missing or of another version, or when the plans are for other GPUs.
        """
        facts = read_plan_facts(artifact)
        _check_sm(facts, device)
        library = load_plan_library(facts[0].library, facts[0].version, load)
        library.use_cache(_cache_file(library, device))
        engines = {one.file: _engine(library, artifact.file(one.file), one) for one in facts}
        size = max(1, *(_memory(engine) for engine in engines.values()))
        scratch = device.allocate(size, "the memory of TensorRT's contexts"), size
        _log.info(
            "%d plans, %s; %s of intermediate values",
            len(facts),
            format_bytes(sum(one.bytes for one in facts)),
            format_bytes(size),
        )
        return cls(device, stream, library, engines, scratch)

    def __call__(self, call: SegmentCall, addresses: Mapping[str, int]) -> Queue:
        """Bind a call. The first binding is a rehearsal, whose run compiles all kernels; later ones can be captured."""
        context, rehearsal, given = self._context(call), (call.node, _shapes(call)), dict(addresses)
        if rehearsal in self.rehearsed:
            if call.captured:
                self._check_capturable(call, context.execution)
            self.library.save_cache()
        else:
            self.rehearsed.add(rehearsal)
            self.library.compiled = True

        def run(stream: Stream) -> None:
            context.prepare(call, stream)
            for name, address in given.items():
                if not context.execution.set_tensor_address(name, address):
                    raise EngineError(f"{call.node}: {call.file} has no tensor {name!r}; build the artifact again")
            if not context.execution.execute_async_v3(int(stream)):
                raise EngineError(f"{call.node}: TensorRT could not queue {call.file}; see its log for the reason")

        return run

    @property
    def version(self) -> str:
        """TensorRT's version."""
        return f"{self.library.name} {self.library.version}"

    def close(self) -> None:
        """Free contexts, engines and their memory. Idempotent."""
        if self.engines:
            self.library.save_cache()
            self.contexts.clear()
            self.engines.clear()
            self.device.free(self.scratch[0])

    def _check_capturable(self, call: SegmentCall, context: Any) -> None:
        capturable = getattr(context, "is_stream_capturable", None)  # only TensorRT-RTX may compile while it runs
        if capturable is not None and not capturable(int(self.stream)):
            raise EngineError(f"{call.file} cannot be captured into a CUDA graph; build the artifact again")

    def _context(self, call: SegmentCall) -> "_Context":
        """Return the context for a call, with its profile and shapes; make it on first use."""
        context = self.contexts.get(call.context)
        if context is None:
            context = self.contexts[call.context] = self._make_context(call)
        context.prepare(call, self.stream)
        return context

    def _make_context(self, call: SegmentCall) -> "_Context":
        engine = self.engines.get(call.file)
        if engine is None:
            raise ArtifactError(f"{call.node}: {PLANS_FILE} names no plan {call.file}; build the artifact again")
        context = self.library.make_context(engine)
        if context is None:
            raise EngineError(f"{call.node}: TensorRT could not make a context of {call.file}; see its log")
        return _Context(context, self.scratch)


@dataclass
class _Context:
    """An execution context, its memory, and the profile and shapes that it has."""

    execution: Any
    scratch: tuple[int, int]
    profile: int | None = None
    shapes: _Shapes = ()

    def prepare(self, call: SegmentCall, stream: Stream) -> None:
        """Set the call's profile and shapes where they differ. EngineError for those that do not fit."""
        profile, shapes = call.profile, _shapes(call)
        if (profile, shapes) == (self.profile, self.shapes):
            return
        if profile != self.profile:
            self._set_profile(call, stream)
        self.shapes = ()  # unknown until all are set
        for name, shape in shapes:
            if not self.execution.set_input_shape(name, shape):
                raise EngineError(f"{call.node}: {call.file} takes no {name} of {shape} in profile {profile}")
        self.shapes = shapes

    def _set_profile(self, call: SegmentCall, stream: Stream) -> None:
        self.profile = None
        if not self.execution.set_optimization_profile_async(call.profile, int(stream)):
            raise EngineError(f"{call.node}: {call.file} has no profile {call.profile} to run; see TensorRT's log")
        self.execution.set_device_memory(*self.scratch)
        self.profile = call.profile


def _shapes(call: SegmentCall) -> _Shapes:
    return tuple(sorted(call.shapes.items()))


def _memory(engine: Any) -> int:
    """Bytes of the largest context of the engine."""
    profiles = range(engine.num_optimization_profiles)
    return max(int(engine.get_device_memory_size_for_profile_v2(profile)) for profile in profiles)


def _check_sm(facts: tuple[PlanFacts, ...], device: Device) -> None:
    for one in facts:
        if device.sm not in one.sms:
            built = ", ".join(map(str, one.sms))
            raise EngineError(
                f"the artifact's plans are for SM {built}, and {device.name} has SM {device.sm}; build it again with "
                f"{device.sm} among gpu.sms, or for target cuda-sm{device.sm}"
            )


def _engine(library: PlanLibrary, file: Path, facts: PlanFacts) -> Any:
    """Make a plan's engine; check its header first, because TensorRT's errors say little."""
    content = file.read_bytes()
    if is_rtx_plan(content[:HEADER_BYTES]):
        version = read_plan_header(content[:HEADER_BYTES], file.name).version
        if version != library.version:
            raise EngineError(
                f"{file.name} is of {facts.library} {version}, and {library.version} is installed: "
                f"pip install {facts.library}=={version}, or build the artifact again"
            )
    return library.engine(content, file.name)


def _cache_file(library: PlanLibrary, device: Device) -> Path:
    """File for kernels compiled on this kind of GPU."""
    gpu = "".join(character if character.isalnum() else "-" for character in device.name)
    return cache_dir() / "compiled-plans" / f"{library.name}-{library.version}-{gpu}-sm{device.sm}"
