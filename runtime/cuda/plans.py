"""Segments of a launch program as TensorRT plans: loaded once, run on the program's own stream.

    plan (file) ─► engine ─► a context for every profile and number of rows ─► a call with addresses ─► stream

Contexts share one piece of memory for what they compute between, for one call follows the other on the stream; each
call gives the context the addresses of its layer. TensorRT-RTX compiles a plan's kernels on the card, when a context is
made and when it first runs: the loader rehearses every call before it sizes the KV pool or captures a graph. What was
compiled is kept in Ingot's cache folder, so that the next start is quick.

TensorRT is imported when plans are loaded, and by this module alone.

Loads an artifact of TensorRT plans: the CUDA executor, whose segments are plans.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ingot.artifact import Artifact
from ingot.artifact.launch_program import SegmentCall
from ingot.artifact.plan_facts import HEADER_BYTES, PLANS_FILE, PlanFacts, ProgramPlans, is_rtx_plan, read_plan_header
from ingot.errors import ArtifactError, EngineError
from ingot.runtime.cuda import executor as cuda
from ingot.runtime.cuda.device import Device, Queue, Stream
from ingot.runtime.cuda.plan_library import PlanLibrary, load_plan_library
from ingot.runtime.options import EngineOptions
from ingot.settings import cache_dir
from ingot.sizes import format_bytes

_LOG = logging.getLogger(__name__)
_Key = tuple[str, int, tuple[tuple[str, tuple[int, ...]], ...]]  # file, profile, shapes of the inputs


def read_plan_facts(artifact: Artifact) -> tuple[PlanFacts, ...]:
    """What the build says of the artifact's plans. ArtifactError where it says nothing, or nothing that can be read."""
    file: Path = artifact.file(PLANS_FILE)
    try:
        return ProgramPlans.model_validate_json(file.read_bytes()).plans
    except ValidationError as error:
        raise ArtifactError(f"{file}: {error.errors()[0]['msg']}; build the artifact again") from error


@dataclass
class Plans:
    """The plans of a program on a device, run on one stream: a `SegmentBinder`, which `open` makes."""

    device: Device
    stream: Stream
    library: PlanLibrary
    engines: dict[str, Any]
    scratch: tuple[int, int]  # address and bytes of what contexts compute in
    contexts: dict[_Key, Any] = field(default_factory=dict)
    rehearsed: set[tuple[_Key, str]] = field(default_factory=set)

    @classmethod
    def open(
        cls, artifact: Artifact, device: Device, stream: Stream, load: Callable[[str], Any] = import_module
    ) -> "Plans":
        """Bring all plans to the device.

        EngineError where TensorRT is missing or of another version, or where the plans are for other cards.
        """
        facts = read_plan_facts(artifact)
        _check_card(facts, device)
        library = load_plan_library(facts[0].library, facts[0].version, load)
        library.recall(_cache_file(library, device))
        engines = {one.file: _engine(library, artifact.file(one.file), one) for one in facts}
        size = max(1, *(_memory(engine) for engine in engines.values()))
        scratch = device.allocate(size, "the memory of TensorRT's contexts"), size
        _LOG.info(
            "%d plans, %s; %s between", len(facts), format_bytes(sum(one.bytes for one in facts)), format_bytes(size)
        )
        return cls(device, stream, library, engines, scratch)

    def __call__(self, call: SegmentCall, addresses: Mapping[str, int]) -> Queue:
        """Bind a call. The first time is a rehearsal: all is compiled when it ran. Then it can be captured."""
        context, rehearsal, given = self._context(call), (_key(call), call.node), dict(addresses)
        if rehearsal in self.rehearsed:
            self._check_capturable(call, context)
            self.library.keep()
        self.rehearsed.add(rehearsal)

        def run(stream: Stream) -> None:
            for name, address in given.items():
                if not context.set_tensor_address(name, address):
                    raise EngineError(f"{call.node}: {call.file} has no tensor {name!r}; build the artifact again")
            if not context.execute_async_v3(int(stream)):
                raise EngineError(f"{call.node}: TensorRT could not queue {call.file}; its log says why")

        return run

    def close(self) -> None:
        """Give back contexts, engines and their memory. Idempotent."""
        if self.engines:
            self.library.keep()
            self.contexts.clear()
            self.engines.clear()
            self.device.free(self.scratch[0])

    def _check_capturable(self, call: SegmentCall, context: Any) -> None:
        ask = getattr(context, "is_stream_capturable", None)  # TensorRT-RTX alone may compile while it runs
        if ask is not None and not ask(int(self.stream)):
            raise EngineError(f"{call.file} cannot be captured into a CUDA graph; build the artifact again")

    def _context(self, call: SegmentCall) -> Any:
        """The context for a call's profile and shapes, made when first asked for."""
        key = _key(call)
        if key not in self.contexts:
            self.contexts[key] = self._make_context(call)
            self.library.compiled = True
        return self.contexts[key]

    def _make_context(self, call: SegmentCall) -> Any:
        engine = self.engines.get(call.file)
        if engine is None:
            raise ArtifactError(f"{call.node}: {PLANS_FILE} names no plan {call.file}; build the artifact again")
        context = self.library.make_context(engine)
        if context is None or not context.set_optimization_profile_async(call.profile, int(self.stream)):
            raise EngineError(f"{call.node}: {call.file} has no profile {call.profile} to run; see TensorRT's log")
        context.set_device_memory(*self.scratch)
        for name, shape in call.shapes.items():
            if not context.set_input_shape(name, shape):
                raise EngineError(f"{call.node}: {call.file} takes no {name} of {shape} in profile {call.profile}")
        return context


def _key(call: SegmentCall) -> _Key:
    return call.file, call.profile, tuple(sorted(call.shapes.items()))


def _memory(engine: Any) -> int:
    """The most that a context of the engine computes in."""
    profiles = range(engine.num_optimization_profiles)
    return max(int(engine.get_device_memory_size_for_profile_v2(profile)) for profile in profiles)


def _check_card(facts: tuple[PlanFacts, ...], device: Device) -> None:
    for one in facts:
        if device.sm not in one.sms:
            built = ", ".join(map(str, one.sms))
            raise EngineError(
                f"the artifact's plans are for SM {built}, and {device.name} has SM {device.sm}; build it again with "
                f"{device.sm} among gpu.sms, or for target cuda-sm{device.sm}"
            )


def _engine(library: PlanLibrary, file: Path, facts: PlanFacts) -> Any:
    """A plan's engine; its header is looked at first, for TensorRT says little of a plan that it does not take."""
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
    """Where kernels that were compiled on such a card are kept."""
    card = "".join(character if character.isalnum() else "-" for character in device.name)
    return cache_dir() / "compiled-plans" / f"{library.name}-{library.version}-{card}-sm{device.sm}"


def load(artifact: Artifact, options: EngineOptions) -> cuda.CudaExecutor:
    """The executor, on the first card that CUDA shows. Raises what `CudaExecutor` and `Plans.open` do."""
    return cuda.load(artifact, options, Plans.open)
