"""Small repositories for the tests of .ci."""

import subprocess
from collections.abc import Mapping
from pathlib import Path

from module_graph import ModuleGraph


def repository(folder: Path, files: Mapping[str, str]) -> ModuleGraph:
    """A repository with these sources by path."""
    subprocess.run(["git", "init", "--quiet", "-b", "main", str(folder)], check=True)
    for name, source in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(source)
    return ModuleGraph(folder)
