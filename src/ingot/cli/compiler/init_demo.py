"""`ingot init-demo`: fetch Ingot's source by git, with the demo model that an installed package does not hold."""

import os
import shutil
import subprocess
from pathlib import Path
from shlex import quote

import click

import ingot
from ingot.cli.terminal.console import print_note
from ingot.errors import LONGEST_PATH, IngotError, UsageError, shown
from ingot.version import project_source

_RECIPE = Path("recipes/demo.yaml")
_STALLED = ("-c", "http.lowSpeedLimit=1000", "-c", "http.lowSpeedTime=60")  # give up on a connection without data


def init_demo_command(folder: Path, source: str | None) -> None:
    """Clone the source into `folder`, at this version's tag if it has one, and print how to build the demo."""
    fetch_source(folder, source)
    click.echo(f"{folder}: Ingot's source, with the demo model. Build and run it with")
    click.echo(f"  ingot build {quote(str(folder / _RECIPE))}")
    click.echo('  ingot run artifacts/demo "def read_file(path):"')


def fetch_source(folder: Path, source: str | None = None) -> None:
    """Clone Ingot's source, or that at another address, into a new folder. UsageError where that cannot be done."""
    source = source or project_source()
    if source is None:
        raise UsageError("Ingot is not installed, and the address of its source not known; give it with --from URL")
    if shutil.which("git") is None:
        raise UsageError(f"init-demo needs git; install it, or download {source} and unpack it into {folder}")
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UsageError(f"{folder}: exists already, and is not replaced; name a new folder")
    tag = _tag_of_this_version(source)
    print_note(f"fetching {source}, {f'tag {tag}' if tag else 'the newest version'}")
    branch = ("--branch", tag) if tag else ()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        _git(source, *_STALLED, "clone", "--quiet", "--depth", "1", *branch, "--", source, str(folder))
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)  # the folder was empty before
        raise
    if not (folder / _RECIPE).is_file():
        raise UsageError(f"{folder}: was fetched but has no {_RECIPE}; is {source} the source of Ingot?")


def _tag_of_this_version(source: str) -> str | None:
    tags = (f"v{ingot.__version__}", ingot.__version__)
    lines = _git(source, *_STALLED, "ls-remote", "--tags", "--", source, *(f"refs/tags/{tag}" for tag in tags))
    found = {line.rpartition("refs/tags/")[2] for line in lines.splitlines()}
    return next((tag for tag in tags if tag in found), None)


def _git(source: str, *arguments: str) -> str:
    """Run git without prompts and return its output; IngotError with its message where it fails."""
    kept = {name: value for name, value in os.environ.items() if name not in ("GIT_DIR", "GIT_WORK_TREE")}
    environment = {**kept, "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    done = subprocess.run(
        ["git", *arguments], env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
    )
    if done.returncode != 0:
        reasons = (line for line in done.stderr.splitlines() if line.startswith("fatal: "))
        reason = next(reasons, f"git ended with exit code {done.returncode}").removeprefix("fatal: ")
        raise IngotError(
            f"{shown(source, LONGEST_PATH)}: cannot be fetched: {reason}; "
            "check the address and the network, or give another with --from URL"
        )
    return done.stdout
