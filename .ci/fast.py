"""Check one file in seconds: `python .ci/fast.py FILE` runs the linters on it, then its tests.

The tests of pipeline/x/y.py are tests/pipeline/x/test_y.py; without such a file, those that import it themselves.
"""

import subprocess
import sys
from pathlib import Path, PurePath

from module_graph import ROOT, ModuleGraph

MOST_FILES = 3
"""Files of tests that run for a file without tests of its own name."""


def main(arguments: list[str]) -> int:
    """Run all checks of a file, also after one fails."""
    if len(arguments) != 1 or not (ROOT / arguments[0]).is_file():
        print("name one file of the repository: make fast FILE=runtime/kv/blocks.py")
        return 2
    file = (ROOT / arguments[0]).absolute().relative_to(ROOT).as_posix()
    commands = [[".ci/check_words.py", file]]
    if file.endswith(".py"):
        commands = [["-m", "ruff", "check", file], ["-m", "ruff", "format", "--check", file], *commands]
    if tests := own_tests(file, ModuleGraph()):
        commands.append(["-m", "pytest", *tests])
    else:
        print(f"no tests import {file} themselves")
    codes = []
    for command in commands:
        print("$", *command, flush=True)
        codes.append(subprocess.run([sys.executable, *command], cwd=ROOT, check=False).returncode)
    return max(codes)


def own_tests(file: str, graph: ModuleGraph) -> list[str]:
    """Find the tests of a file: itself, the one of its name in the same place below tests/, or those that import it."""
    path = PurePath(file)
    tests = [one for one in graph.files if one.startswith("tests/") and PurePath(one).match("test_*.py")]
    if file in tests:
        return [file]
    folder = Path("tests", *path.parts[2:-1] if file.startswith("src/") else path.parts[:-1])
    own = str(folder / f"test_{path.stem}.py")
    if own in tests:
        return [own]
    return [test for test in tests if file in graph.imports(test)][:MOST_FILES] if path.suffix == ".py" else []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
