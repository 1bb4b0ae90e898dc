"""The packages that the benchmark imports and the GPU's machine may lack, as wheels packed with the programs.

    imported by the parts ─► distributions ─► less those that are there ─► with what they require ─► wheels

`fetch_wheels` downloads them for that machine's Python; `check_wheels` proves without it that they suit that Python and
require nothing that is neither there nor packed, and imports every part with only those packages to be found. On the
machine run.py unpacks them in front of the import path: nothing is installed.
"""

import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from email import message_from_string
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import canonicalize_name, parse_wheel_filename

from benchmarks.gpu.parts import PARTS
from benchmarks.paths import ROOT
from ingot.errors import BuildError

PYTHON = (3, 12)
_GLIBC = (17, 24, 26, 27, 28, 31, 34, 35)  # minor versions that wheels are made for, of the oldest systems first
_SECONDS = 300.0
USUAL = Path(__file__).with_name("usual-packages.txt")  # of a machine for torch on a GPU


_TRACE = """
import json, sys
from importlib import import_module, metadata
from benchmarks.gpu.imports import modules_of
from benchmarks.gpu.parts import PARTS
for part in PARTS:
    for module in modules_of(part):
        import_module(module)
owners = metadata.packages_distributions()
print(json.dumps(sorted({owner for name in set(sys.modules) for owner in owners.get(name.partition(".")[0], ())})))
"""


@dataclass(frozen=True)
class Wheel:
    """A packed wheel."""

    file: Path

    @property
    def name(self) -> str:
        """Canonical name of the distribution."""
        return str(parse_wheel_filename(self.file.name)[0])

    @property
    def tags(self) -> frozenset[Tag]:
        """Python tags and platforms that it supports."""
        return frozenset(parse_wheel_filename(self.file.name)[3])

    def requirements(self) -> list[Requirement]:
        """Its requirements on the GPU's machine, without extras."""
        with zipfile.ZipFile(self.file) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
            text = archive.read(name).decode()
        return list(_applying(message_from_string(text).get_all("Requires-Dist", [])))


def names_in(text: str) -> list[str]:
    """Names of distributions in the output of `pip list` or `pip freeze`."""
    first = (re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", line) for line in text.splitlines())
    return [canonicalize_name(found.group()) for found in first if found]


def imported_distributions() -> list[str]:
    """Canonical names of the distributions that the parts import here."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, "-c", _TRACE], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise BuildError(f"the parts cannot be imported here: {done.stderr.strip().splitlines()[-1]}")
    return [canonicalize_name(name) for name in json.loads(done.stdout)]


def to_carry(imported: Iterable[str], there: Iterable[str]) -> list[str]:
    """Distributions that are imported, or required by such, and are not there; by what is installed here."""
    known, found = set(there) | {"ingot", "ingot-llm"}, list[str]()
    waiting = [name for name in imported if name not in known]
    while waiting:
        name = waiting.pop()
        if name in known:
            continue
        known.add(name)
        found.append(name)
        listed = metadata.requires(name) or []
        waiting += [canonicalize_name(requirement.name) for requirement in _applying(listed)]
    return sorted(found)


def _applying(listed: Iterable[str]) -> Iterator[Requirement]:
    """Requirements that apply to the GPU's machine, without extras."""
    version = ".".join(map(str, PYTHON))
    own = {"python_version": version, "python_full_version": f"{version}.0", "extra": ""}
    given = {name: str(value) for name, value in default_environment().items()} | own
    for text in listed:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate(given):
            yield requirement


def fetch_wheels(names: Iterable[str], folder: Path) -> list[Wheel]:
    """Download the wheels, of the versions that are installed here, for the GPU machine's Python."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in _GLIBC[:5]] + ["--platform=manylinux2014_x86_64"]
    wanted = [f"{name}=={metadata.version(name)}" for name in names]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", *platforms]
    version = ".".join(map(str, PYTHON))
    command += ["--implementation=cp", f"--python-version={version}", f"--dest={folder}", *wanted]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"wheels for Python {version} cannot be downloaded: {done.stderr.strip()}")
    return packed_wheels(folder)


def packed_wheels(folder: Path) -> list[Wheel]:
    """The wheels in a folder."""
    return [Wheel(file) for file in sorted(folder.glob("*.whl"))]


def check_wheels(wheels: Iterable[Wheel], there: Iterable[str]) -> None:
    """Raise BuildError for a wheel of another Python or system, one twice, or a requirement that nothing meets."""
    names = [wheel.name for wheel in wheels]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise BuildError(f"several wheels of {', '.join(sorted(twice))} are packed; keep one of each")
    fitting = {*_fitting_tags()}
    for wheel in wheels:
        if not wheel.tags & fitting:
            raise BuildError(
                f"{wheel.file.name} does not run on CPython {'.'.join(map(str, PYTHON))} of Linux on x86-64"
            )
        for requirement in wheel.requirements():
            if canonicalize_name(requirement.name) not in {*names, *there}:
                raise BuildError(
                    f"{wheel.file.name} requires {requirement}, which is neither packed nor on the machine"
                )


def _fitting_tags() -> Iterator[Tag]:
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in _GLIBC] + ["manylinux2014_x86_64", "manylinux1_x86_64"]
    yield from cpython_tags(PYTHON, platforms=platforms)
    yield from compatible_tags(PYTHON, "cp312", platforms)


def check_imports(wheels: Iterable[Wheel], there: Iterable[str], repository: Path = ROOT) -> None:
    """Import what every part imports with only these packages to be found. BuildError names each part and its package.

    A wheel that suits this Python is unpacked as on the GPU's machine; in place of another, and of what is there, the
    process finds the same distribution as it is installed here.
    """
    here = {*compatible_tags(), *cpython_tags()}
    with TemporaryDirectory() as folder:
        linked = Path(folder)
        carried = [wheel for wheel in wheels if not wheel.tags & here]
        for wheel in wheels:
            if wheel.tags & here:
                with zipfile.ZipFile(wheel.file) as archive:
                    archive.extractall(linked)
        for name in [*there, *(wheel.name for wheel in carried)]:
            link_distribution(name, linked)
        problems = failing_imports(linked, repository)
    if problems:
        said = "; ".join(f"{part}: {error}" for part, error in problems.items())
        raise BuildError(f"parts cannot be imported with the packages of the GPU's machine and the wheels: {said}")


def link_distribution(name: str, folder: Path) -> None:
    """Make an installed distribution's files importable from a folder; does nothing if it is not installed here."""
    try:
        files = metadata.distribution(name).files or []
    except metadata.PackageNotFoundError:
        return
    for file in files:
        place = folder / file
        if ".." in file.parts or place.exists():
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(Path(str(file.locate())).absolute())


def failing_imports(folder: Path, repository: Path = ROOT) -> Mapping[str, str]:
    """Parts that cannot be imported with the packages of a folder and the standard library, with their errors."""
    order = {"needs_device": False, "function": PARTS["imports"].function, "ended": [], "only": None}
    paths = os.pathsep.join([str(folder), str(repository / "src"), str(repository)])
    environment = {"PATH": os.environ.get("PATH", ""), "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-S", "-m", "benchmarks.gpu.worker", json.dumps(order)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    if done.returncode:
        return {"all": done.stderr.strip().splitlines()[-1]}
    events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"event"')]
    return {one["task"]: one["error"].splitlines()[-1] for one in events if one["event"] == "end" and one["error"]}
