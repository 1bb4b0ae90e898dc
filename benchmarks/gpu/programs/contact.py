"""The folder that is copied to the GPU's machine: what runs there and what was packed, and nothing else.

    gpu-contact/                        sources and tests as they are in the working tree, without most of their data
    gpu-contact/COMMIT                  the commit that they are from
    gpu-contact/benchmarks/gpu-programs the packed programs

Of the checkpoints of the tests it has those of the small models, which are all that tests marked `gpu` read.
"""

import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import click

from benchmarks.gpu.parts import COMMIT_FILE
from benchmarks.gpu.programs.cases import CASES, DEMO_MODEL
from benchmarks.paths import CHECKPOINTS, GPU_PROGRAMS, RESULTS, ROOT

MOST_BYTES = 64 * 2**20
_LEFT_OUT = (RESULTS, *(ROOT / name for name in ("artifacts", "deploy", "docs", "examples", "tests/fixtures")))
_TAKEN = (DEMO_MODEL, *sorted({CHECKPOINTS / case.checkpoint for case in CASES}))  # of what is left out


def write_contact(packed: Path, folder: Path) -> None:
    """Write the folder anew, and print its size and what to run there. ClickException if it is too large."""
    if folder.exists():
        if not (folder / COMMIT_FILE).is_file():
            raise click.ClickException(f"{folder} exists and was not written by this command; choose another --contact")
        shutil.rmtree(folder)
    copy_sources(folder)
    shutil.copytree(packed, folder / GPU_PROGRAMS.relative_to(ROOT))
    all_bytes, packed_bytes = _bytes(folder), _bytes(packed)
    click.echo(f"{folder}: {all_bytes / 2**20:.1f} MiB, {packed_bytes / 2**20:.1f} of them packed programs")
    if all_bytes > MOST_BYTES:
        raise click.ClickException(f"that is more than {MOST_BYTES / 2**20:.0f} MiB; pack less (--what, --only)")
    click.echo("copy it to the GPU's machine, and run in it: PYTHONPATH=src python3 -m benchmarks.gpu --output results")


def copy_sources(folder: Path) -> None:
    """Copy the files of the working tree that the GPU's machine needs; links stay links."""
    listed = _git("ls-files", "-z", "-co", "--exclude-standard").split("\0")
    for name in needed(name for name in listed if os.path.lexists(ROOT / name)):
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, place, follow_symlinks=False)
    (folder / COMMIT_FILE).write_text(_git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"), "utf-8")


def needed(names: Iterable[str]) -> list[str]:
    """Files of the repository, by their paths within it, without the data that the GPU's machine does not need."""
    paths = {name: ROOT / name for name in names if name}
    return [name for name, path in paths.items() if not _is_in(path, _LEFT_OUT) or _is_in(path, _TAKEN)]


def _is_in(path: Path, folders: Iterable[Path]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)


def _bytes(folder: Path) -> int:
    return sum(file.lstat().st_size for file in folder.rglob("*") if file.is_file() and not file.is_symlink())


def _git(*arguments: str) -> str:
    return subprocess.check_output(["git", *arguments], cwd=ROOT, text=True)
