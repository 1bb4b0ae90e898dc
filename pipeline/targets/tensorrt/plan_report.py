"""Checks a plan before it may run: it is for the requested SMs, and it wastes no launch. Needs no GPU.

A TensorRT-RTX plan contains no machine code but, as text, the program that is compiled on the GPU. A block `main {` per
profile lists its launches with the tensors they read and write. It is followed by a block for the inside of each fused
matmul (`runtime_fusion`), and by tables of tensors. The format is undocumented; this module reads version 1.7.

A launch that reads only weights computes the same in every step: that is how a dequantization or a transposition shows
that was not fused into its matmul.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ingot.artifact.programs.plan_facts import HEADER_BYTES, PlanFacts, PlanProfile, is_rtx_plan, read_plan_header
from ingot.errors import BuildError
from ingot.pipeline.targets.tensorrt.plan_request import PlanRequest
from ingot.progress import note

_BLOCK = re.compile(rb"(shape_)?main \{\n label bb")
_LAUNCH = re.compile(rb'^  ([a-z_]+)=\{ name="?([^" ]+)"?(.*)$', re.MULTILINE)
_READ = re.compile(rb'(?:input_args|input)=\{([^}]*(?:\{[^}"]*\}[^}"]*)*)\}')
_WRITTEN = re.compile(rb'(?:output_args|output)=\{([^}]*(?:\{[^}"]*\}[^}"]*)*)\}')
_QUOTED = re.compile(rb'"([^"]*)"')
_LAYERS = re.compile(rb'layers="([^"]*)"')
_DEREFERENCED = re.compile(rb'base="([^"]+)"[^\n]*? name="([^"]+\^deref)"')
_BOOKKEEPING = frozenset({"shape_call", "memset", "copy", "assert", "signal", "wait"})
_SUFFIX = re.compile(r"( \[profile \d+\])?(\.\d+)?(_\d+)?$")
_FUSION = "runtime_fusion"
_FORMAT = "1.7"  # the release whose plans this module reads


@dataclass(frozen=True)
class PlanLaunch:
    """One launch: kind, name, tensors read and written, and the ONNX nodes that it computes."""

    kind: str
    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    nodes: tuple[str, ...]

    @property
    def operator(self) -> str:
        """A name shared by equal operators: that of a fused kernel, else the kind."""
        return self.name.removeprefix("__myl_") if self.name.startswith("__myl_") else self.kind


@dataclass(frozen=True)
class PlanProgram:
    """The launches of one profile."""

    launches: tuple[PlanLaunch, ...]

    @property
    def operators(self) -> dict[str, int]:
        """Number of launches of each operator, by name."""
        return dict(sorted(Counter(launch.operator for launch in self.launches).items()))

    def constant_launches(self, activations: Collection[str], vectors: Collection[str] = ()) -> tuple[PlanLaunch, ...]:
        """Return the launches that depend on no activation, and so repeat the same work in every step.

        Launches that read only weight vectors cost next to nothing and are left out.
        """
        reached: set[str] = set()
        constant = []
        for launch in self.launches:
            if any(name in reached or _plain(name) in activations for name in launch.reads):
                reached.update(launch.writes)
            elif not launch.reads or any(_plain(name) not in vectors for name in launch.reads):
                constant.append(launch)
        return tuple(constant)


def read_programs(plan: bytes, num_profiles: int) -> tuple[PlanProgram, ...]:
    """Parse the program of each profile. BuildError if the text is not in the format of version 1.7."""
    text = plan[: read_plan_header(plan[:HEADER_BYTES], "the plan").weights_offset]
    bases = {name.decode(): base.decode() for base, name in _DEREFERENCED.findall(text)}
    blocks = [_launches(text, at.start(), bases) for at in _BLOCK.finditer(text) if not at.group(1)]
    programs: list[PlanProgram] = []
    at = 0
    while at < len(blocks):
        programs.append(PlanProgram(blocks[at]))
        at += 1 + sum(launch.kind == _FUSION for launch in blocks[at])
    if at != len(blocks) or len(programs) != num_profiles:
        raise BuildError(
            f"the plan's text lists {len(programs)} programs for {num_profiles} profiles: this release of TensorRT-RTX "
            f"writes it in another format than {_FORMAT}, so its fusions cannot be checked; install tensorrt-rtx "
            f"{_FORMAT}"
        )
    return tuple(programs)


def check_plan(plan: bytes, request: PlanRequest, file: str) -> PlanFacts:
    """Return the plan's facts.

    BuildError if its SMs or version differ from the request's, or if it repeats a computation on weights in every step,
    such as a dequantization that was not fused into its matmul.
    """
    if not is_rtx_plan(plan[:HEADER_BYTES]):
        return _opaque(plan, request, file)
    header = read_plan_header(plan[:HEADER_BYTES], file)
    if set(header.sms) != set(request.sms):
        raise BuildError(f"the plan is for SMs {_listed(header.sms)}, and the request names {_listed(request.sms)}")
    if header.version != request.library_version:
        raise BuildError(f"the plan has version {header.version}, and {request.library_version} built it")
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


def _launches(text: bytes, start: int, bases: Mapping[str, str]) -> tuple[PlanLaunch, ...]:
    block = text[start : text.find(b"\n}\n", start)]
    found = (_launch(kind, name, rest, bases) for kind, name, rest in _LAUNCH.findall(block))
    return tuple(launch for launch in found if launch.kind not in _BOOKKEEPING)


def _launch(kind: bytes, name: bytes, rest: bytes, bases: Mapping[str, str]) -> PlanLaunch:
    reads = tuple(bases.get(read, read) for read in _names(_READ, rest))
    nodes = re.findall(r"\[ONNX Layer: ([^\]]*)\]", _first(_LAYERS, rest).decode())
    return PlanLaunch(kind.decode(), name.decode(), reads, _names(_WRITTEN, rest), tuple(nodes))


def _names(pattern: re.Pattern[bytes], text: bytes) -> tuple[str, ...]:
    return tuple(name.decode() for name in _QUOTED.findall(_first(pattern, text)))


def _first(pattern: re.Pattern[bytes], text: bytes) -> bytes:
    found = pattern.search(text)
    return found.group(1) if found else b""


def _plain(name: str) -> str:
    """Return the network's own name of a tensor: `a [profile 1].1` -> `a`."""
    return _SUFFIX.sub("", name)


def _check_fused(program: PlanProgram, request: PlanRequest) -> None:
    constant = program.constant_launches(request.rows, request.vectors)
    if constant:
        raise BuildError(
            f"TensorRT would compute {'; '.join(map(_described, constant))} from weights alone in every step, which is "
            f"slower than 16-bit weights. Ingot chooses forms that TensorRT-RTX {_FORMAT} fuses into the matmul: "
            f"install tensorrt-rtx {_FORMAT}, or leave these layers out of the quantization"
        )


def _described(launch: PlanLaunch) -> str:
    nodes = ", ".join(launch.nodes) or ", ".join(launch.reads)
    return f"{launch.operator} ({nodes})"


def _profiles(request: PlanRequest, operators: Sequence[dict[str, int]]) -> Iterator[PlanProfile]:
    for profile, counted in zip(request.profiles, operators, strict=True):
        yield PlanProfile(least_rows=profile.least, most_rows=profile.most, operators=counted)


def _opaque(plan: bytes, request: PlanRequest, file: str) -> PlanFacts:
    """Facts of a plan of `tensorrt`, which contains machine code for the GPU that it was built on."""
    note(f"{file}: a plan of {request.library} lists neither SMs nor operators, so its fusions are not checked")
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
