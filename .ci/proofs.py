"""Heavy tests whose results are recorded with a key, so that they run only when what they depend on has changed.

    python .ci/proofs.py check             refuse records whose key is stale: says which files changed
    python .ci/proofs.py prove [NAME ...]  run the tests of stale or named proofs, and record the results
    python .ci/proofs.py sample            run two records again, chosen by the commit, and compare the results
    python .ci/proofs.py inputs NAME       the files of a key, each with the file that imports it

The table .ci/proofs.toml declares the proofs: their tests, files that these use without an import, and where the search
for imports ends. A key is the digest of all these files, of Python's version and of the packages that a proof names.
Of Python sources only the code counts: comments, docstrings and layout may change. A file tests/**/conftest.py counts
itself; what it imports does not, unless the proof names it, because most tests use few of its fixtures.

tests/conftest.py reads the table too: `pytest --everyday` leaves these tests out.
"""

import argparse
import ast
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from importlib import metadata
from pathlib import Path, PurePath
from typing import Any
from xml.etree import ElementTree

from module_graph import ROOT, ModuleGraph

TABLE = ROOT / ".ci" / "proofs.toml"
RECORDS = ROOT / ".ci" / "proofs.json"
CPU_INFO = Path("/proc/cpuinfo")
NUM_SAMPLED = 2
TAKE = "run `make prove`, and commit .ci/proofs.json"
CODE = (".c", ".h", ".py")  # other files count by folder
Record = dict[str, Any]


@dataclass(frozen=True)
class Proof:
    """One entry of the table."""

    name: str
    tests: tuple[str, ...]
    """Files and folders of tests, and ids of single tests."""
    uses: tuple[str, ...] = ()
    """Patterns of files that the tests run, compile, read or import by a computed name."""
    ends: tuple[str, ...] = ()
    """Files and folders whose imports do not count: registries that name all passes or engines."""
    packages: tuple[str, ...] = ()
    """Distributions whose installed version belongs to the key."""
    processor: tuple[str, ...] = ()
    """Beginnings of the processor's flags that belong to the key, because tests skip what it cannot run."""

    @property
    def paths(self) -> list[str]:
        """Files and folders of the tests."""
        return [test.partition("::")[0] for test in self.tests]


@dataclass
class Key:
    """The present inputs of a proof."""

    files: dict[str, str]
    versions: dict[str, str]
    finders: dict[str, str] = field(repr=False)

    @property
    def digest(self) -> str:
        """The key itself."""
        return sha256(json.dumps([self.files, self.versions], sort_keys=True).encode()).hexdigest()[:16]


def main(arguments: Sequence[str]) -> int:
    """Run one command; 1 when a proof is stale or fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("check", "prove", "sample", "inputs"))
    parser.add_argument("names", nargs="*", metavar="NAME")
    given = parser.parse_args(arguments)
    proofs = read_table()
    if unknown := sorted({*given.names} - {*proofs}):
        parser.error(f"no such proof: {', '.join(unknown)}; .ci/proofs.toml has {', '.join(proofs)}")
    chosen = {name: proofs[name] for name in given.names} or proofs
    keys = Keys()
    if given.command == "inputs":
        for proof in chosen.values():
            print(*(f"{file} <- {finder}" for file, finder in keys.of(proof).finders.items()), sep="\n")
        return 0
    if given.command == "check":
        return _check(chosen, keys)
    if given.command == "prove":
        return _prove(chosen, keys, is_forced=bool(given.names))
    return _sample(chosen)


def read_table(table: Path = TABLE) -> dict[str, Proof]:
    """The declared proofs by name."""
    rows = tomllib.loads(table.read_text(encoding="utf-8"))
    return {name: Proof(name, **{key: (*value,) for key, value in row.items()}) for name, row in rows.items()}


def read_records() -> tuple[dict[str, Record], dict[str, str]]:
    """The recorded results by name, and the digests of all files at that time."""
    read = json.loads(RECORDS.read_text(encoding="utf-8")) if RECORDS.exists() else {"proofs": {}, "files": {}}
    return read["proofs"], read["files"]


class Keys:
    """Finds the keys of proofs; reads each file once."""

    def __init__(self, graph: ModuleGraph | None = None) -> None:
        self._graph = graph or ModuleGraph()
        self._digests: dict[str, str] = {}

    def of(self, proof: Proof) -> Key:
        """Find the key of a proof; refuses one that names files that do not exist, or packages that are missing."""
        graph = self._graph
        named = {pattern: [file for file in graph.files if _matches(file, pattern)] for pattern in _patterns(proof)}
        if missing := [pattern for pattern, files in named.items() if not files]:
            raise SystemExit(f"proof {proof.name}: .ci/proofs.toml names {', '.join(missing)}: no such file")
        conftests = [file for file in graph.files if file.endswith("/conftest.py")]
        roots = {file for files in named.values() for file in files if not _is_note(file)}
        roots |= {file for file in conftests if any(path.startswith(str(Path(file).parent)) for path in proof.paths)}
        finders = graph.closure(roots, (*proof.ends, *conftests))
        digests = {file: self._digest(file) for file in sorted(finders) if Path(file).suffix in CODE}
        data: dict[str, list[str]] = {}
        for file in sorted({*finders} - {*digests}):
            data.setdefault(f"{Path(file).parent}/*", []).append(f"{file} {self._digest(file)}")
        digests |= {folder: _short("\n".join(lines).encode()) for folder, lines in data.items()}
        versions = {"python": _python(), **{name: _version(name, proof) for name in proof.packages}}
        if proof.processor:
            versions["processor"] = _flags(proof.processor)
        return Key(digests, versions, finders)

    def _digest(self, file: str) -> str:
        if file not in self._digests:
            content = (self._graph.root / file).read_bytes()
            if file.endswith(".py"):
                content = code_of(self._graph.tree(file)).encode()
            self._digests[file] = _short(content)
        return self._digests[file]


def _short(content: bytes) -> str:
    return sha256(content).hexdigest()[:8]


def code_of(tree: ast.Module) -> str:
    """A module's code without comments, layout and docstrings."""
    kept = ast.parse("")
    kept.body = _without_docstrings(tree.body)
    return ast.dump(kept)


def _without_docstrings(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    kept = [one for one in body if not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))]
    for one in kept:
        if isinstance(one, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            one.body = _without_docstrings(one.body)
    return kept


def differences(record: Record, files: Mapping[str, str], key: Key) -> list[str]:
    """Return the changes since a result was recorded, in words."""
    versions = record["versions"]
    found = [f"{name} {versions.get(name)} -> {now}" for name, now in key.versions.items() if versions.get(name) != now]
    for file, digest in key.files.items():
        if files.get(file) != digest:
            finder = key.finders.get(file)
            found.append(f"{file}{'' if file in files else ' (new)'}{f', imported by {finder}' if finder else ''}")
    return found


def _check(proofs: Mapping[str, Proof], keys: Keys) -> int:
    records, _ = read_records()
    stale = {name: found for name, proof in proofs.items() if (found := _stale(proof, keys))}
    for name, found in stale.items():
        print(f"proof {name} is stale: {'; '.join(found[:5])}{f'; {len(found) - 5} more' if len(found) > 5 else ''}")
    unused = sorted({*records} - {*proofs}) if len(proofs) == len(read_table()) else []
    if unused:
        print(f".ci/proofs.json has records of no proof: {', '.join(unused)}")
    if stale or unused:
        print(f"{len(stale)} of {len(proofs)} proofs are stale: {TAKE}")
        return 1
    seconds = sum(records[name]["processor_seconds"] for name in proofs)
    print(f"{len(proofs)} proofs have a key that is up to date; they took {seconds:.0f} s of processor time")
    return 0


def _stale(proof: Proof, keys: Keys) -> list[str]:
    records, files = read_records()
    if proof.name not in records:
        return ["it was never recorded"]
    key = keys.of(proof)
    record = records[proof.name]
    if record["key"] == key.digest:
        return []
    return differences(record, files, key) or ["other files belong to it now, or it was left stale when others ran"]


def _prove(proofs: Mapping[str, Proof], keys: Keys, *, is_forced: bool) -> int:
    failed: list[str] = []
    for name, proof in proofs.items():
        found = _stale(proof, keys)
        if not found and not is_forced:
            continue
        print(f"proof {name}: {'; '.join(found[:5]) or 'asked for'}", flush=True)
        key = keys.of(proof)
        result = run(proof)
        if result is None:
            failed.append(name)
        elif Keys().of(proof).digest != key.digest:
            raise SystemExit(f"proof {name}: its sources changed while the tests ran; start again")
        else:
            _write(name, {"key": key.digest, **result, "versions": key.versions}, keys)
    if failed:
        print(f"not recorded, because tests failed: {', '.join(failed)}")
    return bool(failed)


def _write(name: str, record: Record, keys: Keys) -> None:
    """Keep one more result. Its files' digests replace older ones; files that no proof depends on are dropped."""
    declared = read_table()
    records, files = read_records()
    records = {one: kept for one, kept in {**records, name: record}.items() if one in declared}
    used = {file for one in records for file in keys.of(declared[one]).files}
    files = {file: digest for file, digest in {**files, **keys.of(declared[name]).files}.items() if file in used}
    text = json.dumps({"files": files, "proofs": records}, indent=1, sort_keys=True)
    RECORDS.write_text(f"{text}\n", encoding="utf-8")


def _sample(proofs: Mapping[str, Proof]) -> int:
    """Run some records again: a key may miss what its tests depend on."""
    commit = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    records, _ = read_records()
    is_wrong = False
    for name in sampled([*records], commit.stdout.strip()):
        print(f"proof {name}, chosen by the commit, runs again", flush=True)
        result = run(proofs[name])
        if result is None or any(result[part] != records[name][part] for part in ("outcomes", "skipped")):
            recorded = {part: records[name][part] for part in ("outcomes", "skipped")}
            print(f"proof {name}: recorded {recorded}, now {result}. Its key misses what changed: see .ci/proofs.toml")
            is_wrong = True
    return is_wrong


def sampled(names: Sequence[str], commit: str) -> list[str]:
    """The records that a commit's check runs again: a rerun chooses the same."""
    return random.Random(commit).sample(sorted(names), min(NUM_SAMPLED, len(names)))


def run(proof: Proof) -> Record | None:
    """Run a proof's tests and count outcomes, skips and processor seconds. None when one fails or none runs."""
    before = _processor_seconds()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        workers = ("--numprocesses", "auto", "--dist", "worksteal")
        command = [sys.executable, "-m", "pytest", *workers, f"--junitxml={report}", *proof.tests]
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        if code:
            return None
        cases = [*ElementTree.parse(report).iter("testcase")]
    skips = Counter(skip.get("message", "") for case in cases for skip in case.findall("skipped"))
    passed = len(cases) - sum(skips.values())
    if not passed:
        print(f"proof {proof.name}: every test was skipped: {dict(skips)}")
        return None
    seconds = round(_processor_seconds() - before, 1)
    return {"outcomes": {"passed": passed}, "skipped": dict(skips), "processor_seconds": seconds}


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _patterns(proof: Proof) -> Iterator[str]:
    yield from proof.paths
    yield from proof.uses


def _matches(file: str, pattern: str) -> bool:
    is_named = PurePath(file).match(pattern) and file.count("/") == pattern.count("/")
    return is_named or file.startswith(f"{pattern}/")


def _is_note(file: str) -> bool:
    return file.endswith(".md")


def _python() -> str:
    return ".".join(map(str, sys.version_info[:2]))


def _flags(beginnings: tuple[str, ...]) -> str:
    """The processor's flags with these beginnings, as Linux names them; empty on other systems."""
    try:
        lines = CPU_INFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "").partition(":")[2].split()
    return " ".join(sorted({flag for flag in flags if flag.startswith(beginnings)}))


def _version(name: str, proof: Proof) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        raise SystemExit(f"proof {proof.name} needs {name}, which is not installed: use `make prove`") from None


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main(sys.argv[1:]))
