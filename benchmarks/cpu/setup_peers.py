"""Make the virtual environment of the peers: torch first, then the rest; llama.cpp is compiled for this machine.

    python -m benchmarks.cpu.setup_peers

Compiling llama.cpp needs cmake and a C++ compiler and takes some minutes. A package that cannot be installed is named,
and the others are installed; the benchmark then leaves that engine out.
"""

import os
import subprocess
import sys
import venv
from pathlib import Path

import click

from benchmarks.paths import ROOT
from benchmarks.peers import PEERS_VENV

REQUIREMENTS = ROOT / "benchmarks" / "requirements.txt"
# Each group is installed with one call to pip, in this order. torch comes first and alone: its pin keeps the later
# installs from bringing another build.
GROUPS = (
    ("torch",),
    ("transformers", "onnx", "onnx-ir", "onnxruntime", "onnxruntime-genai"),
    ("openvino", "openvino-tokenizers", "openvino-genai", "nncf", "optimum"),
    ("optimum-intel",),
    ("gguf", "safetensors"),
    ("llama-cpp-python",),
)
_FROM_SOURCE = "llama-cpp-python"
_WITHOUT_DEPENDENCIES = (
    "optimum-intel"  # it requires torchvision, which brings another build of torch; no text model uses it
)


def pinned(requirements: str) -> dict[str, str]:
    """Package name -> line of the requirements file, without comments."""
    lines = [line.strip() for line in requirements.splitlines()]
    return {line.partition("==")[0]: line for line in lines if line and not line.startswith("#")}


@click.command(help=__doc__)
@click.option("--venv", "folder", type=click.Path(path_type=Path), default=PEERS_VENV, show_default=True)
def main(folder: Path) -> None:
    """Create the environment if it does not exist, and install what is missing."""
    if not (folder / "bin" / "python").is_file():
        venv.create(folder, with_pip=True)
    packages = pinned(REQUIREMENTS.read_text("utf-8"))
    failed = [group for group in GROUPS if not _install(folder, [packages[name] for name in group])]
    for group in failed:
        click.echo(f"could not be installed: {', '.join(group)} (see pip's message above)", err=True)
    sys.exit(1 if failed else 0)


def _install(folder: Path, lines: list[str]) -> bool:
    command = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "-c", str(REQUIREMENTS), *lines]
    if lines[0].startswith(_FROM_SOURCE):
        command += ["--no-binary", _FROM_SOURCE]
    if lines[0].startswith(_WITHOUT_DEPENDENCIES):
        command += ["--no-deps"]
    click.echo("installing " + " ".join(lines))
    environment = {"CMAKE_ARGS": "-DGGML_NATIVE=ON", **os.environ}
    return subprocess.run(command, env=environment).returncode == 0


if __name__ == "__main__":
    main()
