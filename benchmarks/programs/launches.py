"""Count the kernel launches of a step, by bucket and kernel. No GPU needed, and nothing is compiled.

    python -m benchmarks.programs.launches                          # Llama-3.1-8B, int4, as cuda-sm90 would run it
    python -m benchmarks.programs.launches --model tinyllama --json
    python -m benchmarks.programs.launches artifacts/int4-cuda      # of an artifact for a GPU

A step with greedy sampling: the launches of the program and of the kernel that chooses tokens. `a layer` counts the
launches of one decoder layer.
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.gpu.programs.models import SPECS, ProgramSpec
from benchmarks.gpu.programs.write import prepare
from ingot.artifact import open_artifact
from ingot.artifact.programs.launch_checks import read_launches
from ingot.artifact.programs.launch_program import Kernel, Launch, LaunchProgram, LibraryMatmul, SegmentCall, Step

_LAYER = "layers."  # names of nodes contain it with the layer's number


@dataclass(frozen=True)
class Counted:
    """The launches of one bucket's step."""

    program: str
    bucket: str
    by_kernel: Mapping[str, int]
    a_layer: float

    @property
    def total(self) -> int:
        """All launches."""
        return sum(self.by_kernel.values())


def counted(name: str, kernels: Mapping[str, Kernel], programs: Iterable[LaunchProgram]) -> Iterator[Counted]:
    """Count each bucket of a program."""
    for bucket in programs:
        steps = [*bucket.launches, *bucket.samplers.get("greedy", ())]
        layers = {step.node.partition(_LAYER)[2].partition(".")[0] for step in steps if _LAYER in step.node}
        of_layers = sum(_LAYER in step.node for step in steps)
        by_kernel = Counter(_kernel(kernels, step) for step in steps)
        yield Counted(name, bucket.name, dict(by_kernel.most_common()), round(of_layers / max(1, len(layers)), 2))


def _kernel(kernels: Mapping[str, Kernel], step: Step) -> str:
    if isinstance(step, Launch):
        return kernels[step.kernel].name
    if isinstance(step, LibraryMatmul):
        return step.library
    return f"segment of {step.engine}" if isinstance(step, SegmentCall) else "copy next to the host"


def of_model(spec: ProgramSpec, target: str) -> list[Counted]:
    """Lower a model of which only the shapes exist, and count."""
    with TemporaryDirectory() as folder:
        lowered = prepare(spec, Path(folder), target=target).lowered
    return [*counted(spec.name, lowered.shared.kernels, lowered.programs)]


def of_artifact(folder: Path) -> list[Counted]:
    """Count an artifact's launches. ArtifactError if it has no launch program."""
    artifact = open_artifact(folder)
    program = read_launches(artifact)
    return [*counted(artifact.manifest.name, program.kernels, program.programs)]


def table(rows: Iterable[Counted]) -> str:
    """A table for each program: kernels by buckets, totals, launches a layer."""
    tables = []
    programs: dict[str, list[Counted]] = {}
    for row in rows:
        programs.setdefault(row.program, []).append(row)
    for name, of_program in programs.items():
        kernels = dict.fromkeys(kernel for row in of_program for kernel in row.by_kernel)
        lines = [[name, *(row.bucket for row in of_program)]]
        lines += [[kernel, *(str(row.by_kernel.get(kernel, "-")) for row in of_program)] for kernel in kernels]
        lines += [["a layer", *(f"{row.a_layer:g}" for row in of_program)]]
        lines += [["all", *(str(row.total) for row in of_program)]]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        tables += ["\n".join(_line(line, widths) for line in lines)]
    return "\n\n".join(tables)


def _line(cells: list[str], widths: list[int]) -> str:
    first, *others = (cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
    return "  ".join([first.strip().ljust(widths[0]), *others])


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path, nargs="?", help="folder of an artifact for a GPU")
    parser.add_argument(
        "--model", default=SPECS[0].name, help="programs whose names contain this (default: %(default)s)"
    )
    parser.add_argument("--target", default="cuda-sm90", help="of the models (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args()
    if given.artifact:
        rows = of_artifact(given.artifact)
    else:
        chosen = [spec for spec in SPECS if spec.name == given.model] or [s for s in SPECS if given.model in s.name]
        if not chosen:
            parser.error(f"no program's name contains {given.model!r}; there are: {', '.join(s.name for s in SPECS)}")
        rows = [row for spec in chosen for row in of_model(spec, given.target)]
    print(json.dumps([{**asdict(row), "total": row.total} for row in rows], indent=1) if given.json else table(rows))


if __name__ == "__main__":
    main()
