"""Make a virtual environment for each package of the comparison; their pins conflict.

    python -m benchmarks.quantizers.setup_packages

On Linux a CPU build of torch saves gigabytes: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu. A package that
cannot be installed is named, and the others are installed; the comparison then says so in its rows.
"""

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

import click

from benchmarks.quantizers.runs import VENVS

# torch comes first and alone, and pins what follows: a package may require another build, of gigabytes.
FIRST = ("torch==2.13.0", "numpy", "setuptools", "wheel")
ENVIRONMENTS: dict[str, tuple[str, ...]] = {
    "llm_compressor": ("llmcompressor==0.14.0.1", "compressed-tensors==0.19.0", "transformers==5.17.0", "gguf==0.19.0"),
    "gptqmodel": ("gptqmodel==7.6.0", "transformers==5.23.0"),
    "auto_round": ("auto-round==0.16.1", "transformers==5.23.0"),
    "auto_awq": ("autoawq==0.2.9", "transformers==5.23.0"),
    # later versions of peft lack a name that auto-gptq imports
    "auto_gptq": ("auto-gptq==0.7.1", "transformers==4.51.3", "peft==0.13.2"),
}


@click.command(help=__doc__)
@click.option("--venvs", type=click.Path(path_type=Path), default=VENVS, show_default=True)
@click.option("--only", multiple=True, type=click.Choice(list(ENVIRONMENTS)), help="Default: all.")
def main(venvs: Path, only: tuple[str, ...]) -> None:
    """Create the environments that do not exist, and install what is missing."""
    failed = [name for name in only or ENVIRONMENTS if not install(venvs / name, ENVIRONMENTS[name])]
    for name in failed:
        click.echo(f"could not be installed: {name} (see pip's message above)", err=True)
    sys.exit(1 if failed else 0)


def install(folder: Path, packages: tuple[str, ...]) -> bool:
    """Install torch and then the packages; return whether all are installed."""
    if not (folder / "bin" / "python").is_file():
        venv.create(folder, with_pip=True)
    return _pip(folder, FIRST) and _pip(folder, (FIRST[0], *packages))


def _pip(folder: Path, packages: tuple[str, ...]) -> bool:
    """Install without build isolation: the set-up code of autoawq and gptqmodel imports the environment's torch."""
    click.echo(f"{folder.name}: installing {' '.join(packages)}")
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write(FIRST[0] + "\n")
        constraints.flush()
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-build-isolation"]
        return subprocess.run([*pip, "-c", constraints.name, *packages]).returncode == 0


if __name__ == "__main__":
    main()
