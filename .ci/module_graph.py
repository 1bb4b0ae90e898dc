"""The Python modules of the repository and the imports between them, read from the sources without running any."""

import ast
import re
import subprocess
from collections import deque
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINKED = ("kernels", "passes", "pipeline", "planning", "runtime", "validation")  # folders that src/ingot has links to
_DOTTED = re.compile(r"""["']([a-z_]\w*(?:\.\w+)+)(?::\w+)?["']""")

Import = tuple[str, str | None]
"""A module, and the name that is imported from it; None where the module itself is imported."""


class ModuleGraph:
    """Files and modules of a repository, by paths relative to its root."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root
        self._trees: dict[str, ast.Module] = {}
        self._imports: dict[str, set[str]] = {}
        self._re_exports: dict[str, dict[str, Import]] = {}

    @cached_property
    def files(self) -> list[str]:
        """Every file that git tracks or would add."""
        command = ["git", "-C", str(self.root), "ls-files", "-co", "--exclude-standard"]
        names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        return sorted({name for name in names if (self.root / name).is_file()})

    @cached_property
    def file_of(self) -> dict[str, str]:
        """The file of each module."""
        return {module_name(file): file for file in self.files if file.endswith(".py")}

    def tree(self, file: str) -> ast.Module:
        """The parsed source of a file."""
        if file not in self._trees:
            self._trees[file] = ast.parse(self.source(file), file)
        return self._trees[file]

    def source(self, file: str) -> str:
        """The text of a file."""
        return (self.root / file).read_text(encoding="utf-8")

    def imports(self, file: str) -> set[str]:
        """The files that a file imports itself; a name that a package re-exports leads to where it is defined."""
        if file not in self._imports:
            package = module_name(file) if file.endswith("__init__.py") else module_name(file).rpartition(".")[0]
            imported = {*_imports_below(self.tree(file), package)}
            found = {target for module, name in imported for target in self._targets(module, name)}
            self._imports[file] = (found | self._named_in_strings(file)) - {file}
        return self._imports[file]

    def closure(self, files: Iterable[str], ends: Iterable[str] = ()) -> dict[str, str]:
        """These files and all that they import, directly or not, each with the file that it was found in.

        What the files below `ends` import is left out. A package's `__init__` belongs to the closure of its modules;
        what it imports does not, unless a name is imported through it: a file that imports one of the names that a
        package re-exports does not depend on the rest.
        """
        found: dict[str, str] = {}
        followed: set[str] = set()
        waiting = deque((file, "") for file in sorted(files))
        while waiting:
            file, finder = waiting.popleft()
            found.setdefault(file, finder)
            if file in followed or not file.endswith(".py"):
                continue
            followed.add(file)
            for init in self._inits(file):
                found.setdefault(init, file)
            if not file.startswith((*ends,)):
                waiting += ((one, file) for one in sorted(self.imports(file)))
        return found

    def _inits(self, file: str) -> Iterator[str]:
        parts = module_name(file).split(".")
        for count in range(1, len(parts)):
            if init := self.file_of.get(".".join(parts[:count])):
                yield init

    def _named_in_strings(self, file: str) -> set[str]:
        """Modules that registries import by name ("ingot.passes.fusion.clean_up:CleanUp"), and monkeypatch.

        Not packages: the name of a package in a string is mostly that of a logger.
        """
        names = {*_DOTTED.findall(self.source(file))}
        found = {self.file_of.get(name) or self.file_of.get(name.rpartition(".")[0], "") for name in names}
        return {one for one in found if one and not one.endswith("__init__.py")}

    def _targets(self, module: str, name: str | None, depth: int = 0) -> Iterator[str]:
        inner = self.file_of.get(f"{module}.{name}")
        file = inner or self.file_of.get(module)
        if file is None:
            return
        is_package = name is not None and inner is None and file.endswith("__init__.py")
        origin = self._bound(file).get(name or "") if is_package and depth < 9 else None
        if origin is None:
            yield file
        else:
            yield from self._targets(*origin, depth + 1)

    def _bound(self, init: str) -> dict[str, Import]:
        """Names that an `__init__` imports, with their origin; also those that it imports on first use."""
        if init not in self._re_exports:
            base = module_name(init)
            imports = [node for node in statements(self.tree(init)) if isinstance(node, ast.ImportFrom)]
            self._re_exports[init] = {
                alias.asname or alias.name: (_base(node, base), alias.name) for node in imports for alias in node.names
            }
        return self._re_exports[init]


def module_name(file: str) -> str:
    """The dotted name by which a file is imported."""
    path = file.removeprefix("src/").removeprefix(".ci/").removesuffix(".py").removesuffix("/__init__")
    name = path.replace("/", ".")
    return f"ingot.{name}" if name.partition(".")[0] in LINKED else name


def _base(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    parts = package.split(".")
    above = parts[: len(parts) - node.level + 1]
    return ".".join([*above, *([node.module] if node.module else [])])


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """The statements below a node, at every depth."""
    for part in ("body", "handlers", "orelse", "finalbody", "cases"):
        for child in getattr(node, part, ()):
            yield child
            yield from statements(child)


def _imports_below(node: ast.AST, package: str) -> Iterator[Import]:
    """Imports at every depth; those for the type checker alone are not run, and do not count."""
    for_types = {
        id(inner)
        for child in statements(node)
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        for outer in child.body
        for inner in (outer, *statements(outer))
    }
    for child in statements(node):
        if id(child) in for_types:
            continue
        if isinstance(child, ast.Import):
            yield from ((alias.name, None) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield from ((_base(child, package), alias.name) for alias in child.names)
