"""The C library compiled with sanitizers, under the tests of kernels, programs and threads, and under the fuzzer.

    python -m benchmarks.cpu.sanitize [--sanitizer address|undefined|thread] [--cases N] [--work FOLDER]

`make sanitize` runs all three. undefined has conversions of floats that are out of range, and lanes of vectors; it and
thread have the portable kernels alone. Each compiles the library of its own into a copy of the runtime, so that the one
in use stays, and runs CHECKS with it. All that a sanitizer reports is a finding, whether the check fails or not.
Needs gcc or clang with its sanitizers. Exits with 1 if there are findings.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.paths import ROOT

CHECK_SECONDS = 3600
_SOURCE = ROOT / "src" / "ingot"
_NATIVE = Path("runtime/cpu/native")
# Unoptimized: unrolled kernels with checks in them take a compiler many minutes otherwise.
_COMMON = ("-O0", "-g1", "-std=gnu11", "-fno-fast-math", "-fno-math-errno", "-ffp-contract=off", "-fPIC")
_REPORT = re.compile(r"runtime error: .*|(?:ERROR|WARNING): \w+Sanitizer: .*")


@dataclass(frozen=True)
class Sanitizer:
    """Flags of the compiler, the library that Python must load first, and its options by environment variable."""

    flags: tuple[str, ...]
    preload: str
    options: Mapping[str, str]


_PORTABLE = "-DPORTABLE_ONLY"  # kernels.c

SANITIZERS = {
    # Python keeps much until it exits. Sizes that the system refuses are tested: they give NULL.
    "address": Sanitizer(
        ("-fsanitize=address", "-fno-omit-frame-pointer"),
        "libasan.so",
        {"ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:exitcode=86"},
    ),
    "undefined": Sanitizer(
        ("-fsanitize=undefined,float-cast-overflow", _PORTABLE), "libubsan.so", {"UBSAN_OPTIONS": "halt_on_error=0"}
    ),
    "thread": Sanitizer(
        ("-fsanitize=thread", _PORTABLE),
        "libtsan.so",
        {"TSAN_OPTIONS": "exitcode=86:halt_on_error=0:ignore_noninstrumented_modules=1:report_signal_unsafe=0"},
    ),
}

_SINGLE = (
    ("tests/runtime/cpu/native", "--ignore=tests/runtime/cpu/native/test_kernels.py", "-k", "not thread_team"),
    ("tests/runtime/cpu", "--ignore=tests/runtime/cpu/native"),
    ("tests/e2e/test_lora.py",),
)
CHECKS: Mapping[str, Sequence[tuple[str, ...]]] = {
    "address": _SINGLE,
    "undefined": _SINGLE,
    "thread": (
        ("tests/runtime/cpu/native/test_program.py", "tests/runtime/cpu/native/test_program_invariance.py"),
        ("tests/runtime/cpu/native/test_attention.py", "tests/runtime/cpu/native/test_program_experts.py"),
        ("tests/runtime/cpu/test_native_executor.py", "tests/runtime/cpu/test_host_blocks.py"),
    ),
}
"""Arguments of pytest."""

FUZZED: Mapping[str, tuple[str, str]] = {
    "int4-kv8": ("int4-kv8-cpu", "llama"),
    "experts": ("int4-cpu", "mixtral"),
    "latent attention, grouped experts": ("fp32-cpu", "deepseek_v3"),
    "delta rule": ("int8-cpu", "qwen3_next"),
    "scan": ("fp32-cpu", "bamba"),
    "sinks, windows, clamped activation": ("fp32-cpu", "gpt_oss"),
    "caps": ("int4-cpu", "gemma2"),
}
"""Recipes and checkpoints of tests/fixtures whose programs the fuzzer damages."""


def main() -> int:
    """Run the command; the exit status is 1 if there are findings."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sanitizer", choices=SANITIZERS, action="append")
    parser.add_argument("--cases", type=int, default=1000, help="damaged programs of each artifact (default: 1000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, help="keep the libraries and reports in this folder")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = (arguments.work or Path(temporary)).resolve()
        reports = [
            sanitize(name, work / name, arguments.cases, arguments.seed) for name in arguments.sanitizer or SANITIZERS
        ]
    print(json.dumps(reports, indent=2))
    return int(any(report["findings"] for report in reports))


def sanitize(name: str, work: Path, cases: int, seed: int) -> dict[str, object]:
    """Compile the library, run checks and fuzzer with it; return times, results, and findings with their counts."""
    sanitizer, began = SANITIZERS[name], time.monotonic()
    library = build_tree(work, sanitizer)
    environment = environment_of(sanitizer, work)
    report: dict[str, object] = {"sanitizer": name, "compile_seconds": round(time.monotonic() - began, 1)}
    report["checks"] = [_checked(arguments, environment) for arguments in CHECKS[name]]
    if name != "thread":
        report["fuzzed"] = dict(_fuzzed(work, environment, cases, seed))
    report["findings"] = findings(work / "reports")
    report["library"] = str(library)
    return report


def build_tree(work: Path, sanitizer: Sanitizer) -> Path:
    """Make work/tree/ingot, the package with a runtime whose library has the sanitizer; return the library."""
    # It needs hatchling, which only the dev group has.
    from hatch_build import compile_library

    package = work / "tree" / "ingot"
    shutil.rmtree(package, ignore_errors=True)
    package.mkdir(parents=True)
    for entry in _SOURCE.iterdir():
        if entry.name == "runtime":
            shutil.copytree(entry.resolve(), package / entry.name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        else:
            (package / entry.name).symlink_to(entry.resolve())
    library = package / _NATIVE / "ingot_cpu.so"
    flags = (*_COMMON, *sanitizer.flags)
    problem = compile_library(package / _NATIVE, library, flags, ("-shared",))
    if problem is not None:
        raise SystemExit(problem)
    return library


def environment_of(sanitizer: Sanitizer, work: Path) -> dict[str, str]:
    """The environment in which Python loads the tree's library; reports are written to work/reports."""
    reports = work / "reports"
    shutil.rmtree(reports, ignore_errors=True)
    reports.mkdir(parents=True)
    options = {name: f"{value}:log_path={reports / name}" for name, value in sanitizer.options.items()}
    return {
        **os.environ,
        **options,
        "PYTHONPATH": os.pathsep.join([str(work / "tree"), str(ROOT)]),
        # Python's own allocator hands out parts of large blocks, whose ends no sanitizer sees.
        "PYTHONMALLOC": "malloc",
        "LD_PRELOAD": _preloaded(sanitizer.preload),
    }


def findings(reports: Path) -> dict[str, int]:
    """Count each different report of the sanitizer."""
    found: Counter[str] = Counter()
    for file in sorted(reports.iterdir()):
        for line in file.read_text(errors="replace").splitlines():
            if _REPORT.search(line):
                found[_without_addresses(line)] += 1
    return dict(found)


def _checked(arguments: Sequence[str], environment: Mapping[str, str]) -> dict[str, object]:
    began = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, errors="replace", timeout=CHECK_SECONDS
    )
    said = done.stdout.strip().splitlines()
    print(*said[-12:], done.stderr[-2000:], sep="\n", file=sys.stderr)
    return {
        "tests": " ".join(arguments),
        "exit_status": done.returncode,
        "result": said[-1] if said else "",
        "seconds": round(time.monotonic() - began, 1),
    }


def _fuzzed(work: Path, environment: Mapping[str, str], cases: int, seed: int) -> Iterator[tuple[str, object]]:
    from tests.program_fuzz import Damager, try_cases

    for name, (recipe, checkpoint) in FUZZED.items():
        began = time.monotonic()
        folder = _artifact(work / "artifacts" / checkpoint / recipe, recipe, checkpoint)
        trial = try_cases(folder, Damager(folder).cases(seed, cases), environment)
        for case, reason in trial.findings:
            print(name, json.dumps(case), reason, sep="\n", file=sys.stderr)
        yield name, {**trial.summary(), "seconds": round(time.monotonic() - began, 1)}


def _artifact(folder: Path, recipe: str, checkpoint: str) -> Path:
    from tests.conftest import UNMEASURED
    from tests.parity import CHECKPOINTS

    from ingot.builder import build

    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        build(recipe, [f"checkpoint={CHECKPOINTS / checkpoint}", "cpu.engine=native", *UNMEASURED], folder)
    return folder


def _preloaded(library: str) -> str:
    """The sanitizer's library, which must be loaded before Python's."""
    compiler = shlex.split(os.environ.get("CC", "")) or [next(filter(shutil.which, ("cc", "gcc", "clang")), "cc")]
    done = subprocess.run([*compiler, f"-print-file-name={library}"], capture_output=True, text=True, check=True)
    path = done.stdout.strip()
    if not Path(path).is_absolute():
        raise SystemExit(f"{shlex.join(compiler)} has no {library}: install its sanitizers, or set CC to gcc")
    return path


def _without_addresses(line: str) -> str:
    """A report without what differs from one run to the next."""
    line = line.replace(str(ROOT), "").rpartition("/native/")[2]
    return re.sub(r"0x[0-9a-f]+|==\d+==|-?\d{4,}", "N", line).strip()


if __name__ == "__main__":
    sys.exit(main())
