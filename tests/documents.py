"""Fenced blocks of the documents, and a shell that runs those of a page in order.

A block in sh is run. A block whose first line is a comment with a file name is that file; of a workflow of GitHub
Actions the commands are run too, but for those that install. A block in text after one that is run is what it prints:
`...` in a line is any text, and a line of `...` alone any lines, or none.
"""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.data_paths import ROOT

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# ([\w./-]+\.\w+)\n")
_MARK = "\x1e"  # before the output of a block; no command prints it
_PORT = "8000"  # each run replaces it
_SECONDS = 900


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and the line of the page on which the text begins."""

    language: str
    text: str
    line: int

    @property
    def file_name(self) -> str | None:
        """The file that the block is, by the comment in its first line."""
        found = _FILE.match(self.text)
        return found[1] if found and self.language != "sh" else None

    @property
    def commands(self) -> str | None:
        """The commands to run: the block itself, or the steps of a workflow; None for other blocks."""
        if self.language == "sh":
            return self.text
        if not (self.file_name or "").startswith(".github/workflows/"):
            return None
        (job,) = yaml.safe_load(self.text)["jobs"].values()
        steps = [step for step in job["steps"] if "run" in step and "pip install" not in step["run"]]
        variables = {name: str(value) for step in steps for name, value in step.get("env", {}).items()}
        return "\n".join([*(f"export {name}={value}" for name, value in variables.items()), *(s["run"] for s in steps)])


@dataclass(frozen=True)
class Step:
    """A block in sh that was run, with the output that the page shows (None: it shows none) and the actual one."""

    block: Block
    expected: str | None
    output: str

    @property
    def is_as_shown(self) -> bool:
        """Return whether the output is the one of the page."""
        return self.expected is None or re.fullmatch(_pattern(self.expected), self.output.strip()) is not None


def blocks_of(text: str) -> list[Block]:
    """The fenced blocks of a document, in order."""
    return [Block(found[1], found[2], text.count("\n", 0, found.start()) + 2) for found in _FENCE.finditer(text)]


def run_page(page: Path, folder: Path, environment: Mapping[str, str]) -> Iterator[Step]:
    """Run the blocks of a page in `folder` by one shell, whose home has the clone as `ingot`; yield the steps.

    AssertionError, with what the block has printed, where a command fails or the page takes too long.
    """
    port = _free_port()
    blocks = [Block(block.language, block.text.replace(_PORT, port), block.line) for block in _shown(page)]
    commands = [block for block in blocks if block.commands]
    outputs = _run_shell(_script(blocks, folder / "blocks"), _work_folder(folder), environment)
    for block, output in zip(commands, outputs, strict=True):
        following = blocks[blocks.index(block) + 1 :][:1]
        expected = following[0].text if following and following[0].language == "text" else None
        yield Step(block, expected, output)


def _shown(page: Path) -> list[Block]:
    return blocks_of(page.read_text(encoding="utf-8"))


def _work_folder(folder: Path) -> Path:
    (folder / "home").mkdir(parents=True)
    (folder / "home" / "ingot").symlink_to(ROOT)
    work = folder / "work"
    work.mkdir()
    return work


def _script(blocks: list[Block], sources: Path) -> str:
    """The page as a script: files are copied to their places, and each block in sh is marked in the output."""
    sources.mkdir(parents=True)
    lines = ["set -euo pipefail", "exec 2>&1", "trap 'kill $(jobs -p) 2> /dev/null || true' EXIT"]
    for number, block in enumerate(blocks):
        if name := block.file_name:
            (sources / str(number)).write_text(block.text, encoding="utf-8")
            lines += [f"mkdir -p $(dirname {name}) && cp {sources / str(number)} {name}"]
        if commands := block.commands:
            lines += [f"printf '{_MARK}'", commands]
    return "\n".join([*lines, f"printf '{_MARK}'"])


def _run_shell(script: str, folder: Path, environment: Mapping[str, str]) -> list[str]:
    """Return the outputs of the blocks that ran, without the last one's where it failed."""
    given = {**os.environ, **_environment(folder.parent), **environment}
    command = ["bash", "-c", script]
    shell = subprocess.run(
        command, cwd=folder, env=given, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, timeout=_SECONDS
    )
    _, *outputs = shell.stdout.split(_MARK)
    assert shell.returncode == 0, f"exit code {shell.returncode}, after:\n{outputs[-1]}"
    return outputs[:-1]


def _environment(folder: Path) -> dict[str, str]:
    """Variables by which the page's programs are those of this environment, and pip installs offline, into `folder`."""
    packages = str(folder / "packages")
    return {
        "GITHUB_STEP_SUMMARY": str(folder / "step_summary.md"),
        "HOME": str(folder / "home"),
        "INGOT_PROGRESS": "none",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PIP_NO_BUILD_ISOLATION": "0",  # pip reads it as its option's value: no isolation
        "PIP_NO_DEPS": "1",
        "PIP_NO_INDEX": "1",
        "PIP_TARGET": packages,
        "PYTHONPATH": os.pathsep.join([packages, *filter(None, [os.environ.get("PYTHONPATH")])]),
    }


def _pattern(expected: str) -> str:
    """A regular expression for the output that a page shows."""
    lines = []
    for line in expected.strip().splitlines():
        if line.strip() == "...":
            lines.append(r"(?:.*\n)*?")
        else:
            lines.append(re.escape(line.rstrip()).replace(r"\.\.\.", ".*?") + r" *\n")
    return "".join(lines).removesuffix(r" *\n") if lines[-1] != r"(?:.*\n)*?" else f"{''.join(lines)}.*"


def _free_port() -> str:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return str(server.getsockname()[1])
