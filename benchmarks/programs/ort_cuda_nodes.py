"""Check where onnxruntime places the nodes of the target ort-cuda's segments, on a machine without a GPU.

    pip install --no-deps --target GPU onnxruntime-gpu
    python -m benchmarks.programs.ort_cuda_nodes --package GPU --output benchmarks/results/ort-cuda-nodes.json

The CUDA provider and its table of kernels are the real ones; CUDA's libraries are stand-ins that compute nothing,
compiled from cuda_stand_in.c (the runtime) and generated functions that return success. Needs gcc and nm. A process
with their folder in LD_LIBRARY_PATH loads the provider without a GPU, a driver or CUDA.

The fixtures of all families are lowered with weights of every form in float16, bfloat16 and float32; the runtime's own
code loads every segment, refuses nodes that are not on the provider, and runs it once for a decode and a ragged bucket.
Reported for each form: the fewest and the most kernels that a program launched; waits, streams and copies to or from
the host (each should be 0); or the refusal. Numbers are not checked.
"""

import ctypes
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.device import device_facts
from benchmarks.paths import CHECKPOINTS
from ingot.artifact import Artifact
from ingot.artifact.programs.launch_program import ActivationType, SegmentCall
from ingot.errors import IngotError
from ingot.passes.manager import PassManager
from ingot.passes.registry import make_pass
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.model.importer import import_checkpoint
from ingot.pipeline.targets.cuda.program_builder import Bucket
from ingot.pipeline.targets.cuda.tiles import TileTable
from ingot.pipeline.targets.ort_cuda.writer import lower_with_segments
from ingot.pipeline.targets.table import get_target

RUNTIME = "libcudart.so"
SOURCE = Path(__file__).with_name("cuda_stand_in.c")
_LIBRARY = re.compile(r"lib(cu\w+)\.so\.\d+")
_DRIVER = "libcuda.so.1"
_HANDLES = ("cublasCreate_v2", "cublasLtCreate")  # functions whose result the provider reads
_DEFINED = re.compile(r"^(?:Status|Pointer \*|const char \*|void) ?(\w+)\(", re.MULTILINE)
_STREAM = 0x5151
_BYTES = 1 << 20  # more than any buffer of a fixture
_OFFSET = 256
_COUNTED = ("launches", "waits", "streams", "copies")


def compile_stand_ins(provider: Path, folder: Path) -> None:
    """Write the libraries that the provider's shared object needs into the folder."""
    functions = _imported(provider)
    for library in _needed(provider):
        text = _source(library, functions.get(library, []))
        _compile(text, folder / library, versioned=library in functions and library != _DRIVER)


def _needed(provider: Path) -> list[str]:
    shown = _output("readelf", "-d", str(provider))
    return [match.group() for line in shown.splitlines() if "NEEDED" in line and (match := _LIBRARY.search(line))]


def _imported(provider: Path) -> dict[str, list[str]]:
    """Functions by the library whose version they require; functions without a version belong to the driver."""
    found: dict[str, list[str]] = defaultdict(list)
    for line in _output("nm", "-D", "--undefined-only", str(provider)).splitlines():
        name, _, version = line.split()[-1].partition("@")
        if _LIBRARY.fullmatch(version.lstrip("@")):
            found[version.lstrip("@")].append(name)
        elif not version and re.match(r"cu[A-Z]", name):
            found[_DRIVER].append(name)
    return dict(found)


def _source(library: str, names: list[str]) -> str:
    text = SOURCE.read_text(encoding="utf-8") if library.startswith(RUNTIME) else "#include <stdlib.h>\n"
    defined = set(_DEFINED.findall(text))
    lines = []
    for name in names:
        if name in _HANDLES:
            lines.append(f"int {name}(void **handle) {{ return *handle = malloc(8), 0; }}")
        elif name not in defined:
            lines.append(f"int {name}() {{ return 0; }}")
    return text + "\n".join(lines) + "\n"


def _compile(text: str, file: Path, *, versioned: bool) -> None:
    source = file.with_suffix(".c")
    source.write_text(text, encoding="utf-8")
    command = ["gcc", "-shared", "-fPIC", "-w", "-o", str(file), str(source), f"-Wl,-soname,{file.name}"]
    if versioned:
        versions = file.with_suffix(".map")
        versions.write_text(f"{file.name} {{ global: *; }};\n", encoding="utf-8")
        command.append(f"-Wl,--version-script={versions}")
    subprocess.run(command, check=True)


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


COMPUTE: tuple[ActivationType, ...] = ("fp16", "bf16", "fp32")
FORMS: Mapping[str, Sequence[tuple[str, Mapping[str, object]]]] = {
    "plain": (),
    "int2": (("quantize-weights", {"bits": 2, "block_size": 32}),),
    "int4": (("quantize-weights", {"block_size": 16, "symmetric": True}),),
    "int4, zero points": (("quantize-weights", {"block_size": 32}),),
    "int8, zero points": (("quantize-weights", {"bits": 8, "block_size": 32, "symmetric": False}),),
    "int8, int8 activations": (
        ("quantize-weights", {"bits": 8, "block_size": "channel"}),
        ("quantize-activations", {}),
    ),
    "float8": (("fp8", {"activations": "none"}),),
    "float8, float8 activations": (("fp8", {"activations": "dynamic"}),),
}


class _Stream:
    def __int__(self) -> int:
        return _STREAM


class _Files(Artifact):
    """A folder with segments, without a manifest."""

    def __init__(self, path: Path) -> None:
        object.__setattr__(self, "path", path)

    def file(self, name: str) -> Path:
        return self.path / name


@click.command()
@click.option("--package", required=True, type=click.Path(exists=True, path_type=Path), help="where onnxruntime-gpu is")
@click.option("--output", type=click.Path(path_type=Path), help="JSON with device, versions and results")
@click.option("--worker", is_flag=True, hidden=True)
def main(package: Path, output: Path | None, worker: bool) -> None:
    """Start the process that loads the provider; print and write its results."""
    if worker:
        for result in _results():
            print(json.dumps(result), flush=True)
        return
    with tempfile.TemporaryDirectory(prefix="ingot-stand-ins-") as folder:
        compile_stand_ins(package / "onnxruntime" / "capi" / "libonnxruntime_providers_cuda.so", Path(folder))
        path = os.pathsep.join([str(package.resolve()), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "LD_LIBRARY_PATH": folder, "PYTHONPATH": path}
        command = [sys.executable, "-m", "benchmarks.programs.ort_cuda_nodes", "--package", str(package), "--worker"]
        ended = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    results = [json.loads(line) for line in ended.stdout.splitlines()]
    _show(results)
    if output:
        versions = results[0]["versions"]
        report = {"device": device_facts(), "versions": versions, "results": _by_form(results)}
        output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _results() -> Iterator[dict[str, Any]]:
    import onnxruntime  # type: ignore[import-untyped]

    versions = {"onnxruntime-gpu": onnxruntime.__version__, "cuda": onnxruntime.cuda_version}
    for family in sorted(folder.name for folder in CHECKPOINTS.iterdir() if folder.is_dir()):
        for form in FORMS:
            for compute in COMPUTE:
                found = {"family": family, "form": form, "compute": compute, **_placed(family, form, compute)}
                yield found | {"versions": versions}


def _placed(family: str, form: str, compute: ActivationType) -> dict[str, Any]:
    """Counts of one program, or the refusal."""
    from ingot.runtime.cuda.ort_segments import OrtSegments

    model = import_checkpoint(Checkpoint.open(CHECKPOINTS / family))
    after = ("clean-up", *get_target("ort-cuda").lowering)
    passes = [make_pass(name) for name in ("fold-constants", "pack-projections")]
    passes += [make_pass(name, options) for name, options in FORMS[form]] + [make_pass(name) for name in after]
    PassManager(passes).run(model)
    with tempfile.TemporaryDirectory() as folder:
        try:
            buckets = (Bucket.decode(4, 64), Bucket.ragged(8, 64, 4))
            lowered = lower_with_segments(model, Path(folder), buckets, compute, TileTable())
            stream = _Stream()
            segments = OrtSegments(_Files(Path(folder)), stream)
            calls = [call for one in lowered.programs for call in one.segment_calls]
            for call in calls:
                segments(call, _addresses(call))  # loads the file, with its few constants
            _counts()
            for call in calls:
                segments(call, _addresses(call, _OFFSET))(stream)
        except IngotError as error:
            return {"refused": str(error)}
        counts = _counts()
        segments.close()
    return {"calls": len(calls), **counts}


_memory: list[Any] = []


def _addresses(call: SegmentCall, offset: int = 0) -> dict[str, int]:
    """Memory for every operand, with this many bytes copied in; memory of earlier calls is reused."""
    operands = (*call.inputs, *call.outputs)
    while len(_memory) < len(operands):
        _memory.append(ctypes.create_string_buffer(_BYTES))
    return {name: ctypes.addressof(memory) + offset for name, memory in zip(operands, _memory, strict=False)}


def _counts() -> dict[str, int]:
    """Counts since the last call."""
    counts = (ctypes.c_long * len(_COUNTED))()
    ctypes.CDLL("libcudart.so.13").stand_in_counts(counts)
    return dict(zip(_COUNTED, counts, strict=True))


def _by_form(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each form and compute type."""
    rows = []
    for form, compute in dict.fromkeys((result["form"], result["compute"]) for result in results):
        mine = [one for one in results if (one["form"], one["compute"]) == (form, compute)]
        placed = [one for one in mine if "refused" not in one]
        row: dict[str, Any] = {"form": form, "compute": compute, "families": len(mine), "placed": len(placed)}
        if placed:
            launches = [one["launches"] for one in placed]
            row |= {"launches": [min(launches), max(launches)]}
            row |= {key: sum(one[key] for one in placed) for key in _COUNTED[1:]}
        if refused := sorted({one["refused"] for one in mine if "refused" in one}):
            row["refused"] = refused
        rows.append(row)
    return rows


def _show(results: Sequence[Mapping[str, Any]]) -> None:
    placed = [result for result in results if "refused" not in result]
    others = sum(result[key] for result in placed for key in _COUNTED[1:])
    print(f"{len(placed)} of {len(results)} programs are on the provider as a whole; {others} waits, streams, copies")
    for refusal in sorted({str(result["refused"]) for result in results if "refused" in result}):
        print(f"refused: {refusal}")


if __name__ == "__main__":
    main()
