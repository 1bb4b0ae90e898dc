"""What a plan will run, read from the plan itself and without a card.

A TensorRT-RTX plan holds no machine code: it holds, as text, the program that is compiled on the card. One block
`main {` for each profile lists its launches with what they read and write, followed by one block for the inside of
each fused matmul (`runtime_fusion`), and by tables of tensors. The format is not documented; this reads version 1.7.

From the launches follows what matters most: a launch that reads weights alone computes the same in each step, which is
how a dequantization (or a transposition) that was not fused into its matmul shows.
"""

import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ingot.artifact.plan_facts import HEADER_BYTES, read_plan_header
from ingot.errors import BuildError

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


@dataclass(frozen=True)
class PlanLaunch:
    """One launch: its kind and name, the tensors it reads and writes, and the ONNX nodes that it computes."""

    kind: str
    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    nodes: tuple[str, ...]

    @property
    def operator(self) -> str:
        """A name that is the same for equal operators: that of a fused kernel, or the kind."""
        return self.name.removeprefix("__myl_") if self.name.startswith("__myl_") else self.kind


@dataclass(frozen=True)
class PlanProgram:
    """The launches of one profile."""

    launches: tuple[PlanLaunch, ...]

    @property
    def operators(self) -> dict[str, int]:
        """How often each operator is launched, by name."""
        return dict(sorted(Counter(launch.operator for launch in self.launches).items()))

    def of_weights_alone(self, activations: Collection[str], vectors: Collection[str] = ()) -> tuple[PlanLaunch, ...]:
        """Launches that no activation reaches: they make the same of constants and weights in every step. Those that
        read nothing but weights that are vectors cost next to nothing, and are left out."""
        reached: set[str] = set()
        alone = []
        for launch in self.launches:
            if any(name in reached or _plain(name) in activations for name in launch.reads):
                reached.update(launch.writes)
            elif not launch.reads or any(_plain(name) not in vectors for name in launch.reads):
                alone.append(launch)
        return tuple(alone)


def read_programs(plan: bytes, num_profiles: int) -> tuple[PlanProgram, ...]:
    """The program of each profile; BuildError when the text is not what is known of it."""
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
            f"the plan's text shows {len(programs)} programs for {num_profiles} profiles: this release of TensorRT-RTX "
            "writes it otherwise than 1.7, and its fusions cannot be checked; install tensorrt-rtx 1.7"
        )
    return tuple(programs)


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
    """`a [profile 1].1` -> `a`: the network's own name of a tensor."""
    return _SUFFIX.sub("", name)
