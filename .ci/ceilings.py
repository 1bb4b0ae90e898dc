"""Counts that may only fall: sizes of folders, names with two meanings, habits of comments and docstrings.

    python .ci/ceilings.py           fail where a count is above its ceiling; name those that are below
    python .ci/ceilings.py --lower   write the counts that fell to .ci/ceilings.json

Of a count that rose, the items in files that differ from the branch main are named, or all of them if none does.
"""

import argparse
import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from module_graph import LINKED, ROOT, ModuleGraph, statements

CEILINGS = ROOT / ".ci" / "ceilings.json"
SHIPPED = ("src/ingot/", *(f"{folder}/" for folder in LINKED))
MOST_MODULES = 16
"""Modules of a folder, without `__init__`."""
LINES_AT_A_TIME = 500
"""The ceiling of lines is a multiple of it, so that not every commit changes it."""
LINES = "lines that ship"
FOLDER = "modules in "
ENDS = "docstrings with a sentence that ends in an auxiliary"
MOST_SHOWN = 30

# Folders of runtime/ from the top down: one may import those of its row. Modules directly in runtime/ do not count.
RUNTIME_ORDER = (
    ("hosting", "server", "doctor", "engine_process", "replies"),
    ("engine",),
    ("steps", "speculation"),
    ("requests",),
    ("scheduling",),
    ("kv", "asking", "constraints"),
    ("text", "executors", "cpu", "cuda"),
)

_CONTINUES = re.compile(r"#\s*(?:of|that|which|when|from|by|for|in|at|so)\b")
_AUXILIARY = r"(?:is|are|was|were|has|have|had|do|does|did|can|could|will|would|may|might|must|should)"
_BARE_END = re.compile(rf"\b{_AUXILIARY}[.;:!?](?=\s|$)")
_NOUN_CLAUSE = re.compile(r"(?:What|Whether|Of)\b")


@dataclass(frozen=True)
class Finding:
    """One item that a count counts, and the file that it is in."""

    file: str
    text: str


Rule = Callable[[ModuleGraph], Mapping[str, Sequence[Finding]]]


def main(arguments: Sequence[str], graph: ModuleGraph | None = None, ceilings: Path = CEILINGS) -> int:
    """Compare all counts with their ceilings; 1 when one rose."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lower", action="store_true", help="write the counts that fell")
    is_lowering = parser.parse_args(arguments).lower
    graph = graph or ModuleGraph()
    allowed: dict[str, int] = json.loads(ceilings.read_text(encoding="utf-8"))
    counted = {name: items for rule in RULES for name, items in rule(graph).items()}
    counts = {name: len(items) for name, items in counted.items()} | {LINES: rounded(num_lines(graph))}
    fallen = {name: count for name, count in allowed.items() if counts.get(name, 0) < count}
    risen = {name: count for name, count in counts.items() if count > allowed.get(name, 0)}
    for name, count in risen.items():
        ceiling = allowed.get(name, MOST_MODULES if name.startswith(FOLDER) else 0)
        print(f"{name}: {count}, the ceiling is {ceiling}")
        print(*_shown(counted.get(name, ()), graph), sep="\n")
    if is_lowering and fallen:
        kept = {name: min(count, counts.get(name, 0)) for name, count in allowed.items()}
        kept = {name: count for name, count in kept.items() if count}
        ceilings.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    elif fallen:
        lower = ", ".join(f"{name} from {count} to {counts.get(name, 0)}" for name, count in fallen.items())
        print(f"counts fell ({lower}): run `python .ci/ceilings.py --lower` and commit .ci/ceilings.json")
    return 1 if risen else 0


def _shown(items: Sequence[Finding], graph: ModuleGraph) -> Iterator[str]:
    changed = _changed_files(graph.root)
    own = [item for item in items if item.file in changed] or items
    yield from (f"  {item.text}" for item in own[:MOST_SHOWN])
    if len(own) > MOST_SHOWN:
        yield f"  and {len(own) - MOST_SHOWN} more"


def _changed_files(root: Path) -> set[str]:
    """Files that differ from main, committed or not; none on main itself."""
    for base in ("main", "origin/main"):
        command = ["git", "-C", str(root), "diff", "--name-only", "--merge-base", base]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        if found.returncode == 0:
            return {*found.stdout.splitlines()}
    return set()


def _shipped(graph: ModuleGraph) -> list[str]:
    return [file for file in graph.files if file.startswith(SHIPPED) and file.endswith(".py")]


def _sources(graph: ModuleGraph) -> list[str]:
    return [file for file in graph.files if file.endswith(".py")]


def num_lines(graph: ModuleGraph) -> int:
    """Lines of the modules that ship."""
    return sum((graph.root / file).read_bytes().count(b"\n") for file in _shipped(graph))


def rounded(lines: int) -> int:
    """The next multiple of LINES_AT_A_TIME."""
    return -(-lines // LINES_AT_A_TIME) * LINES_AT_A_TIME


def large_folders(graph: ModuleGraph) -> Mapping[str, Sequence[Finding]]:
    """Modules of each folder that has more than MOST_MODULES."""
    folders: dict[str, list[Finding]] = defaultdict(list)
    for file in _shipped(graph):
        if not file.endswith("__init__.py"):
            folders[str(Path(file).parent)].append(Finding(file, file))
    return {f"{FOLDER}{folder}": files for folder, files in folders.items() if len(files) > MOST_MODULES}


def shared_class_names(graph: ModuleGraph) -> Mapping[str, Sequence[Finding]]:
    """Names of public classes that several modules define."""
    homes: dict[str, list[str]] = defaultdict(list)
    for file in _shipped(graph):
        for node in graph.tree(file).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(file)
    shared = [Finding(files[0], f"{name}: {', '.join(files)}") for name, files in homes.items() if len(files) > 1]
    return {"public class names with several meanings": shared}


def modules_with_one_importer(graph: ModuleGraph) -> Mapping[str, Sequence[Finding]]:
    """Modules that one other module that ships imports, and no other."""
    importers: dict[str, set[str]] = defaultdict(set)
    for file in _shipped(graph):
        for imported in graph.imports(file):
            importers[imported].add(file)
    found = [
        Finding(file, f"{file}: only {next(iter(importers[file]))} imports it")
        for file in _shipped(graph)
        if len(importers[file]) == 1 and not file.endswith("__init__.py")
    ]
    return {"modules with one importer": found}


def upward_imports(graph: ModuleGraph) -> Mapping[str, Sequence[Finding]]:
    """Imports between folders of runtime/ against RUNTIME_ORDER."""
    level = {folder: number for number, row in enumerate(RUNTIME_ORDER) for folder in row}
    files = {file: file.split("/")[1] for file in _shipped(graph) if re.match("runtime/.*/", file)}
    if unknown := {*files.values()} - {*level}:
        raise SystemExit(
            f".ci/ceilings.py: RUNTIME_ORDER has no place for runtime/{', runtime/'.join(sorted(unknown))}"
        )
    found = [
        Finding(file, f"{file} imports {imported}")
        for file, folder in files.items()
        for imported in sorted(graph.imports(file) & {*files})
        if level[files[imported]] < level[folder]
    ]
    return {"upward imports in runtime": found}


def comments_that_continue(graph: ModuleGraph) -> Mapping[str, Sequence[Finding]]:
    """Comments that go on with the code as a clause: "# of these", "# that no thread has taken"."""
    found = []
    for file in _sources(graph):
        source = graph.source(file)
        if _CONTINUES.search(source):
            found += [Finding(file, f"{file}:{line}: {text}") for line, text in first_comments(source)]
    return {"comments that continue the code": [one for one in found if _CONTINUES.match(one.text.split(": ", 1)[1])]}


def first_comments(source: str) -> Iterator[tuple[int, str]]:
    """Each comment after code, and the first line of each comment on lines of its own."""
    last = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            line = token.start[0]
            is_alone = not token.line[: token.start[1]].strip()
            if not is_alone or last != line - 1:
                yield line, token.string
            last = line if is_alone else -1


def docstrings(graph: ModuleGraph) -> Mapping[str, Sequence[Finding]]:
    """Docstrings of functions that return something as a noun clause; sentences that end in a bare auxiliary."""
    clauses, ends = [], []
    for file in _sources(graph):
        tree = graph.tree(file)
        for node in (tree, *statements(tree)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
                continue
            text = ast.get_docstring(node) or ""
            place = f"{file}:{getattr(node, 'lineno', 1)}: {' '.join(text.split())[:90]}"
            if _returns(node) and _NOUN_CLAUSE.match(text):
                clauses.append(Finding(file, place))
            if _BARE_END.search(text):
                ends.append(Finding(file, place))
    return {"docstrings that are noun clauses": clauses, ENDS: ends}


def _returns(node: ast.AST) -> bool:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.returns is None:
        return False
    return not (isinstance(node.returns, ast.Constant) and node.returns.value is None)


RULES: tuple[Rule, ...] = (
    large_folders,
    shared_class_names,
    modules_with_one_importer,
    upward_imports,
    comments_that_continue,
    docstrings,
)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
