"""The process that builds one plan: `python -m ingot.pipeline.targets.tensorrt.build_worker REQUEST PLAN`.

A process of its own returns all memory when it ends, and a crash within TensorRT ends only this process. The log goes
to stderr, one JSON object per line; with exit code 3 its last line is the reason why there is no plan.
"""

import json
import logging
import sys
from pathlib import Path
from typing import Any

from ingot.errors import BuildError, IngotError
from ingot.pipeline.targets.tensorrt.library import Library, load_library
from ingot.pipeline.targets.tensorrt.plan_request import PlanRequest
from ingot.runtime.cuda.plan_library import tensorrt_logger

REFUSED = 3
PEAK_KEY = "peak_bytes"
_STATUS = Path("/proc/self/status")  # getrusage counts memory that the parent held at the fork


def main(request_file: str, plan_file: str) -> int:
    """Build the plan; return the exit code."""
    logging.basicConfig(level=logging.INFO, handlers=[_JsonLines()])
    log = logging.getLogger("ingot.tensorrt")
    try:
        request = PlanRequest.from_json(Path(request_file).read_text(encoding="utf-8"))
        plan = build_plan(load_library(), request)
        with open(plan_file, "wb") as stream:
            stream.write(plan)
    except (IngotError, OSError) as error:
        log.error("%s", error)
        return REFUSED
    print(json.dumps({PEAK_KEY: _peak_bytes()}))
    return 0


def _peak_bytes() -> int | None:
    """Peak memory of this process in bytes; None where the system does not report it."""
    if not _STATUS.exists():
        return None
    lines = (line.split() for line in _STATUS.read_text(encoding="ascii").splitlines())
    return next((1024 * int(words[1]) for words in lines if words[0] == "VmHWM:"), None)


def build_plan(library: Library, request: PlanRequest) -> Any:
    """Build a strongly typed plan on one stream for the request's SMs; return its bytes as a buffer.

    BuildError names the nodes that the parser or the builder refuses. SMs are always set: without them TensorRT-RTX
    claims GPUs that cannot compute the network's types.
    """
    trt, logger = library.module, tensorrt_logger(library.module)
    builder = trt.Builder(logger)
    if builder is None:
        raise BuildError(f"{library.name} {library.version} cannot make a builder; see its log")
    flag = getattr(
        trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None
    )  # None: newer releases, always strongly typed
    network = builder.create_network(0 if flag is None else 1 << int(flag))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(request.onnx):
        raise BuildError(f"{library.name} {library.version} refuses {_refused(parser, request)}")
    config = builder.create_builder_config()
    config.max_aux_streams = 0  # the program runs on one stream
    if library.is_rtx:
        _set_sms(trt, config, request.sms)
        # A CUDA graph can capture launches only with memory that the caller allocated.
        config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
    for profile in request.profiles:
        _add_profile(builder, config, request, profile.least, profile.best, profile.most)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise BuildError(f"{library.name} {library.version} builds no plan for SM {_listed(request.sms)}; see its log")
    return plan


def _set_sms(trt: Any, config: Any, sms: tuple[int, ...]) -> None:
    config.num_compute_capabilities = len(sms)
    for index, sm in enumerate(sms):
        if not config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{sm}"), index):
            raise BuildError(f"TensorRT-RTX refuses SM {sm}, number {index} of {_listed(sms)}")


def _add_profile(builder: Any, config: Any, request: PlanRequest, *rows: int) -> None:
    profile = builder.create_optimization_profile()
    for name, sizes in request.rows.items():
        profile.set_shape(name, *((count, *sizes) for count in rows))
    if config.add_optimization_profile(profile) < 0:
        raise BuildError(f"TensorRT refuses a profile of {rows[0]} to {rows[2]} rows; see its log")


def _refused(parser: Any, request: PlanRequest) -> str:
    """The nodes that the parser refuses, each with its reason."""
    found = _errors(parser)
    with open(request.onnx, "rb") as stream:
        parser.supports_model_v2(stream.read(), request.onnx)
    found |= _errors(parser)
    return "; ".join(found.values()) or "the segment without a reason"


def _errors(parser: Any) -> dict[str, str]:
    """Node name -> reason. As text, because the parser's next call frees its error objects."""
    errors = [parser.get_error(index) for index in range(parser.num_errors)]
    return {error.node_name(): f"{error.node_name()!r} ({error.node_operator()}): {error.desc()}" for error in errors}


def _listed(sms: tuple[int, ...]) -> str:
    return ", ".join(map(str, sms))


class _JsonLines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        """Write the record as one line."""
        sys.stderr.write(f"{json.dumps({'level': record.levelno, 'message': record.getMessage()})}\n")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
