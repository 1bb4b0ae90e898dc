"""The tree at the end of the README: one line per file, its comment the first sentence of the file's own docstring.

python -m tests.readme_tree          # write it anew; tests/test_readme.py holds README and files together
"""

import ast
import re
from pathlib import Path

from tests.data_paths import ROOT

README = ROOT / "README.md"
FOLDERS = (
    ("recipes", "what to build: YAML, one file per purpose"),
    ("src/ingot", "import root: command line, builder, artifact format; links to the folders below"),
    ("pipeline", "checkpoint -> IR -> passes -> program"),
    ("passes", "IR -> IR, one rewrite or one quantizer per file"),
    ("runtime", "artifact -> tokens"),
    ("validation", "artifact + baseline -> evidence, gates, report"),
    ("kernels", "GPU kernels in Triton, compiled ahead of time"),
    ("benchmarks", "speed, side by side with peers"),
    ("examples", "the demo model and how it was made"),
)
_BLOCK = re.compile(r"(?<=## The tree\n\n```text\n).*?(?=```)", re.DOTALL)
_WIDTH = 38


def tree() -> str:
    """The whole tree as text."""
    return "".join(f"{_line(folder + '/', comment)}{_files(ROOT / folder)}" for folder, comment in FOLDERS)


def in_readme() -> str:
    """The tree as the README has it."""
    found = _BLOCK.search(README.read_text(encoding="utf-8"))
    assert found, "README.md has no section 'The tree' with a text block"
    return found.group()


def _files(folder: Path) -> str:
    files = (path for path in sorted(folder.rglob("*.py")) if path.name != "__init__.py" and not _linked(path, folder))
    lines = [_line("  " + path.relative_to(folder).as_posix(), _first_sentence(path)) for path in files]
    lines += [_line("  " + path.name, _first_comment(path)) for path in sorted(folder.glob("*.yaml"))]
    lines += [
        _line("  " + path.relative_to(folder).as_posix(), _c_comment(path)) for path in sorted(folder.rglob("*.c"))
    ]
    return "".join(lines)


def _linked(path: Path, folder: Path) -> bool:
    return any(parent.is_symlink() for parent in path.parents if parent.is_relative_to(folder))


def _first_sentence(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=[.;])\s", paragraph, maxsplit=1)[0].rstrip(".;")


def _first_comment(path: Path) -> str:
    return path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ").rstrip(".")


def _c_comment(path: Path) -> str:
    text = path.read_text(encoding="utf-8").split("*/")[0].lstrip("/* \n")
    return re.split(r"(?<=[.;])\s", " ".join(text.split()), maxsplit=1)[0].rstrip(".;")


def _line(name: str, comment: str) -> str:
    return f"{name:<{_WIDTH}}{comment}\n"


if __name__ == "__main__":
    README.write_text(_BLOCK.sub(lambda _: tree(), README.read_text(encoding="utf-8")), encoding="utf-8")
