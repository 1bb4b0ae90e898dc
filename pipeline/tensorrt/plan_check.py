"""What must hold of a plan before it may run: it is for the cards that were asked for, and nothing in it is wasted."""

from collections.abc import Iterator, Sequence

from ingot.artifact.plan_facts import HEADER_BYTES, PlanFacts, PlanProfile, is_rtx_plan, read_plan_header
from ingot.errors import BuildError
from ingot.pipeline.tensorrt.plan_report import PlanLaunch, PlanProgram, read_programs
from ingot.pipeline.tensorrt.plan_request import PlanRequest
from ingot.progress import note


def check_plan(plan: bytes, request: PlanRequest, file: str) -> PlanFacts:
    """The plan's facts. BuildError when its SMs or version are others than asked for, or when it computes something of
    weights alone in every step: a dequantization that was not fused into its matmul."""
    if not is_rtx_plan(plan[:HEADER_BYTES]):
        return _opaque(plan, request, file)
    header = read_plan_header(plan[:HEADER_BYTES], file)
    if set(header.sms) != set(request.sms):
        raise BuildError(f"the plan is for SMs {_listed(header.sms)}, and {_listed(request.sms)} were asked for")
    if header.version != request.library_version:
        raise BuildError(f"the plan is of version {header.version}, and {request.library_version} built it")
    programs = read_programs(plan, len(request.profiles))
    for program in programs:
        _check_fused(program, request)
    return PlanFacts(
        file=file,
        library=request.library,
        version=header.version,
        sms=header.sms,
        bytes=len(plan),
        weight_bytes=header.weight_bytes,
        profiles=tuple(_profiles(request, [program.operators for program in programs])),
    )


def _check_fused(program: PlanProgram, request: PlanRequest) -> None:
    alone = program.of_weights_alone(request.rows, request.vectors)
    if alone:
        raise BuildError(
            f"TensorRT would compute {'; '.join(map(_described, alone))} of weights alone in every step: their "
            "dequantization is not fused into the matmul, which would be slower than 16-bit weights; quantize these "
            "layers in another form (int4 in blocks of 16 to 256, or 8 bits with a scale a row), or leave them out"
        )


def _described(launch: PlanLaunch) -> str:
    nodes = ", ".join(launch.nodes) or ", ".join(launch.reads)
    return f"{launch.operator} ({nodes})"


def _profiles(request: PlanRequest, operators: Sequence[dict[str, int]]) -> Iterator[PlanProfile]:
    for profile, counted in zip(request.profiles, operators, strict=True):
        yield PlanProfile(least_rows=profile.least, most_rows=profile.most, operators=counted)


def _opaque(plan: bytes, request: PlanRequest, file: str) -> PlanFacts:
    """A plan of `tensorrt` holds machine code for the card that it was built on."""
    note(f"{file}: a plan of {request.library} shows neither its SMs nor its operators; its fusions are not checked")
    return PlanFacts(
        file=file,
        library=request.library,
        version=request.library_version,
        sms=request.sms,
        bytes=len(plan),
        weight_bytes=0,
        profiles=tuple(_profiles(request, [{} for _ in request.profiles])),
    )


def _listed(sms: Sequence[int]) -> str:
    return ", ".join(map(str, sms))
