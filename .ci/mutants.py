"""Plant small random mutants in modules that ship, one at a time, and say which ones the modules' own tests kill.

    python .ci/mutants.py 20 --seed 1              20 mutants over all layers
    python .ci/mutants.py 5 runtime/kv passes      5 in these folders

A mutant flips a comparison or a boolean, moves a number by one, returns None or leaves out a statement. Tests run in a
copy of the tree. Of a mutant that survives the diff is shown: a hole of the tests, or a change that means nothing.
"""

import argparse
import ast
import difflib
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from ceilings import SHIPPED
from fast import own_tests
from module_graph import ROOT, ModuleGraph

MOST_BYTES = 12 << 30
"""Memory of a run: a loop that does not end must not take the machine's."""
_LEFT_OUT = (".git", ".venv*", "artifacts", "dist", "build", ".*_cache", ".hypothesis", "results")
_FLIPPED: dict[type[ast.AST], Any] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


class Mutant(NamedTuple):
    """A part of a source, as offsets of bytes, and the text in its place."""

    begin: int
    end: int
    text: str

    def of(self, source: str) -> str:
        """The mutated source."""
        content = source.encode()
        return (content[: self.begin] + self.text.encode() + content[self.end :]).decode()


def main(arguments: Sequence[str]) -> int:
    """Run the mutants; 1 when one survives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int)
    parser.add_argument("paths", nargs="*", default=SHIPPED)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=180, help="limit of a run; later is killed")
    given = parser.parse_args(arguments)
    rng, graph, outcomes = random.Random(given.seed), ModuleGraph(), list[bool]()
    layers = [[file for file in graph.files if file.endswith(".py") and file.startswith(path)] for path in given.paths]
    in_turn = zip_longest(*(rng.sample(layer, len(layer)) for layer in layers))
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        shutil.copytree(ROOT, tree, symlinks=True, ignore=shutil.ignore_patterns(*_LEFT_OUT))
        for file in (file for row in in_turn for file in row if file):
            source, tests = graph.source(file), own_tests(file, graph)
            mutants = [mutant.of(source) for mutant in mutants_of(source)]
            if len(outcomes) == given.count:
                break
            if mutants and tests and not run(tree, tests, given.seconds):
                mutated = rng.choice(mutants)
                outcomes.append(_is_killed(tree, file, mutated, tests, given.seconds))
                print("killed  " if outcomes[-1] else "SURVIVED", file, *(() if outcomes[-1] else tests))
                changed = difflib.unified_diff(source.splitlines(), mutated.splitlines(), lineterm="", n=1)
                print(*(f"    {line}" for line in [*changed][2:]), sep="\n", flush=True)
    print(f"seed {given.seed}: {sum(outcomes)} of {len(outcomes)} mutants killed by the tests of their own module")
    return not all(outcomes)


def _is_killed(tree: Path, file: str, mutated: str, tests: Sequence[str], seconds: float) -> bool:
    path = tree / file
    original = path.read_text(encoding="utf-8")
    try:
        _write(path, mutated)
        return run(tree, tests, seconds)
    finally:
        _write(path, original)


def _write(path: Path, source: str) -> None:
    """Write a module. What was compiled before may have its size and the same second, by which Python would find it."""
    path.write_text(source, encoding="utf-8")
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
        compiled.unlink()


def mutants_of(source: str) -> Iterator[Mutant]:
    """Every mutant of a module."""
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in _code(ast.parse(source)):
        for instead in _mutations(node):
            begin = starts[node.lineno - 1] + node.col_offset
            yield Mutant(begin, starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0), ast.unparse(instead))


def _code(node: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """Statements and expressions, without annotations, decorators, docstrings, f-strings and imports for types."""
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            is_text = isinstance(child, ast.JoinedStr) or (isinstance(child, ast.Expr) and _is_constant(child.value))
            is_for_types = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            if name in ("annotation", "returns", "decorator_list") or is_text or is_for_types:
                continue
            if isinstance(child, ast.expr | ast.stmt):
                yield child
            if isinstance(child, ast.AST):
                yield from _code(child)


def _is_constant(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant)


def _mutations(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.Compare(left, [operator], comparators):
            yield ast.Compare(left, [_FLIPPED[type(operator)]()], comparators)
        case ast.BoolOp(operator, values):
            yield ast.BoolOp(_FLIPPED[type(operator)](), values)
        case ast.UnaryOp(ast.Not(), operand):
            yield operand
        case ast.Constant(bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(int() as value):
            yield from (ast.Constant(value + 1), ast.Constant(value - 1))
        case ast.Return(ast.AST() as value) if ast.unparse(value) != "None":
            yield ast.Return(ast.Constant(None))
        case ast.Expr() | ast.AugAssign() | ast.Raise() | ast.Assign([ast.Attribute() | ast.Subscript()]):
            yield ast.Pass()


def run(tree: Path, tests: Sequence[str], seconds: float) -> bool:
    """Run tests in a tree; True when one fails, or they take longer."""
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
    process = subprocess.Popen(
        command, cwd=tree, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES)),
    )  # fmt: skip
    try:
        return process.wait(seconds) != 0
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return bool(process.wait())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
