"""The C library compiled with sanitizers, under checks in C, tests of kernels, programs and threads, and the fuzzer.

    python -m benchmarks.cpu.sanitize [--sanitizer address|undefined|thread] [--cases N] [--work FOLDER]

`make sanitize` runs all three. undefined has conversions of floats that are out of range, and lanes of vectors; it and
thread have the portable kernels alone. Each compiles the library of its own into a copy of the runtime, so that the one
in use stays. For address, the engine's pools, weights and buffers are on the heap (tests/simulators/heap_pools.py).
All that a sanitizer reports is a finding, whether the check fails or not. Each is given faults too, which it must
report. Needs gcc with its sanitizers. Exits with 1 for a finding, a check that fails, or a fault that is not reported.
"""

import argparse
import itertools
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

from tests.program_fuzz import PROGRAMS, Damager, build_program, kept_cases, try_cases
from tests.simulators.heap_pools import SHORTENED

from benchmarks.device import device_facts
from benchmarks.paths import ROOT

CHECK_SECONDS = 3600
_SOURCE = ROOT / "src" / "ingot"
_NATIVE = Path("runtime/cpu/native")
_COMMON = ("-g1", "-std=gnu11", "-fno-fast-math", "-fno-math-errno", "-ffp-contract=off", "-fPIC")
_REPORT = re.compile(r"runtime error: .*|(?:ERROR|WARNING): \w+Sanitizer: .*")


@dataclass(frozen=True)
class Sanitizer:
    """Flags of the compiler, the library that Python must load first, and its options by environment variable."""

    flags: tuple[str, ...]
    preload: str
    options: Mapping[str, str]


_PORTABLE = "-DPORTABLE_ONLY"  # kernels.c

SANITIZERS = {
    # Unoptimized: checks in the unrolled kernels of x86 take a compiler minutes otherwise. Python keeps much until it
    # exits. Sizes that the system refuses are tested: they give NULL. New memory is filled with NaN.
    "address": Sanitizer(
        ("-O0", "-fsanitize=address", "-fno-omit-frame-pointer"),
        "libasan.so",
        {
            "ASAN_OPTIONS": "exitcode=86:detect_leaks=0:allocator_may_return_null=1"
            ":max_malloc_fill_size=1000000000:malloc_fill_byte=255"
        },
    ),
    "undefined": Sanitizer(
        ("-O1", "-fsanitize=undefined,float-cast-overflow", _PORTABLE),
        "libubsan.so",
        {"UBSAN_OPTIONS": "halt_on_error=0"},
    ),
    "thread": Sanitizer(
        ("-O1", "-fsanitize=thread", _PORTABLE),
        "libtsan.so",
        {
            "TSAN_OPTIONS": "exitcode=86:halt_on_error=0:die_after_fork=0:report_signal_unsafe=0"
            ":ignore_noninstrumented_modules=1"
        },
    ),
}

_NATIVE_TESTS = "tests/runtime/cpu/native/test_"
_EXECUTOR = ("tests/runtime/cpu/test_native_executor.py", "tests/runtime/cpu/test_host_blocks.py")
_NOT_NATIVE = ("attention", "numpy_attention", "thread_team", "kernels", "half_conversion")
_ONE_THREAD = (
    ("tests/runtime/cpu/native", *(f"--ignore={_NATIVE_TESTS}{name}.py" for name in _NOT_NATIVE)),
    _EXECUTOR,
)
CHECKS: Mapping[str, Sequence[tuple[str, ...]]] = {
    "address": tuple(("-p", "tests.simulators.heap_pools", *arguments) for arguments in _ONE_THREAD),
    "undefined": _ONE_THREAD,
    "thread": (
        (f"{_NATIVE_TESTS}program.py", f"{_NATIVE_TESTS}program_experts.py"),
        _EXECUTOR,
    ),
}
"""Arguments of pytest. Tests that compile C are left out, as C_CHECKS runs what they run, and those of attention alone,
whose references take most of an hour on a busy machine: programs attend too."""

C_CHECKS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "address": {"kernels_check": ("100", "1"), "team_check": ("3", "100", "2")},
    "undefined": {"kernels_check": ("100", "1"), "team_check": ("3", "100", "2")},
    "thread": {"team_check": ("3", "300", "0")},
}
"""Programs of tests/runtime/cpu/native, with their arguments."""


@dataclass(frozen=True)
class Fault:
    """An expression of the library that a C check with other text in its place must make the sanitizer report."""

    file: str
    text: str
    instead: str
    check: str
    arguments: tuple[str, ...]
    sources: tuple[str, ...]


FAULTS = {
    "undefined": Fault(
        "vectors.h", "((vi)((vu)(a) + (vu)(b)))", "((vi)(a) + (vi)(b))", "kernels_check", ("5", "1"), ("kernels.c",)
    ),
    "thread": Fault(
        "thread_team.c",
        "atomic_fetch_add(&team.done, count)",
        "atomic_fetch_add_explicit(&team.done, count, memory_order_relaxed)",
        "team_check",
        ("3", "100", "0"),
        ("thread_team.c",),
    ),
}
"""For address the faults are arrays that end too early (heap_pools.SHORTENED)."""


def main() -> int:
    """Run the command; the exit status is 1 if there is anything to mend."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sanitizer", choices=SANITIZERS, action="append")
    parser.add_argument("--cases", type=int, default=100, help="damaged programs of each artifact (default: 100)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, help="keep the libraries and reports in this folder")
    parser.add_argument("--output", type=Path, help="write the results to this file too")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = (arguments.work or Path(temporary)).resolve()
        reports = [
            sanitize(name, work / name, arguments.cases, arguments.seed) for name in arguments.sanitizer or SANITIZERS
        ]
    results = {"device": device_facts(), "compiler": _version(), "seed": arguments.seed, "sanitizers": reports}
    text = json.dumps(results, indent=2)
    print(text)
    if arguments.output:
        arguments.output.write_text(text + "\n")
    return int(any(report["to_mend"] for report in reports))


def sanitize(name: str, work: Path, cases: int, seed: int) -> dict[str, object]:
    """Compile the library, run checks and fuzzer with it; return times, results, and findings with their counts."""
    sanitizer, began = SANITIZERS[name], time.monotonic()
    for folder in ("reports", "fault-reports"):
        shutil.rmtree(work / folder, ignore_errors=True)
    library = build_tree(work, sanitizer)
    environment = environment_of(sanitizer, work)
    report: dict[str, object] = {"sanitizer": name, "compile_seconds": round(time.monotonic() - began, 1)}
    checks = [_run_check(work, name, check, library) for check in C_CHECKS[name]]
    checks += [_run_tests(arguments, environment) for arguments in CHECKS[name]]
    report["checks"] = checks
    fuzzed = dict(_fuzzed(work, name, environment, cases, seed)) if name != "thread" else {}
    report["fuzzed"], report["findings"] = fuzzed, findings(work / "reports")
    faults = dict(_short_arrays(work) if name == "address" else _fault(work, name))
    report["faults"] = faults
    report["to_mend"] = [
        *(f"{check['check']}: {check['result']}" for check in checks if check["exit_status"] != 0),
        *(f"{artifact}: {trial['findings']} programs" for artifact, trial in fuzzed.items() if trial["findings"]),
        *map(str, findings(work / "reports")),
        *(f"{fault} was not reported" for fault, found in faults.items() if not found),
    ]
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


def _reporting(sanitizer: Sanitizer, reports: Path) -> dict[str, str]:
    """The environment in which the sanitizer writes its reports to this folder."""
    reports.mkdir(parents=True, exist_ok=True)
    options = {name: f"{value}:log_path={reports / name}" for name, value in sanitizer.options.items()}
    return {**os.environ, **options}


def environment_of(sanitizer: Sanitizer, work: Path, reports: str = "reports") -> dict[str, str]:
    """The environment in which Python loads the tree's library; reports are written to this folder in `work`."""
    return {
        **_reporting(sanitizer, work / reports),
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


def _run_check(work: Path, name: str, check: str, library: Path) -> dict[str, object]:
    """Compile and run a C check with the sanitizer's library."""
    linked = (str(library), f"-Wl,-rpath,{library.parent}")
    program = _compiled_check(work, SANITIZERS[name], check, library.parent, linked)
    return _ran([str(program), *C_CHECKS[name][check]], _reporting(SANITIZERS[name], work / "reports"))


def _run_tests(arguments: Sequence[str], environment: Mapping[str, str]) -> dict[str, object]:
    return _ran([sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments], environment)


def _ran(command: Sequence[str], environment: Mapping[str, str]) -> dict[str, object]:
    """Run a check; exit status None: it took longer than CHECK_SECONDS."""
    began, before = time.monotonic(), os.times()
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, errors="replace", timeout=CHECK_SECONDS
        )
        status, out, errors = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired as error:
        status, out, errors = None, str(error.stdout), str(error)
    said, after = out.strip().splitlines(), os.times()
    print(*said[-12:], errors[-2000:], sep="\n", file=sys.stderr)
    return {
        "check": " ".join(command[5:] if "pytest" in command else (Path(command[0]).name, *command[1:])),
        "exit_status": status,
        "result": said[-1] if said else "",
        "seconds": round(time.monotonic() - began, 1),
        "processor_seconds": round(_of_children(after) - _of_children(before), 1),
    }


def _of_children(times: os.times_result) -> float:
    return times.children_user + times.children_system


def _compiled_check(
    work: Path, sanitizer: Sanitizer, check: str, include: Path, linked: Sequence[str], name: str = ""
) -> Path:
    program = work / (name or check)
    source = ROOT / "tests" / "runtime" / "cpu" / "native" / f"{check}.c"
    flags = (*_COMMON, *sanitizer.flags, f"-I{include}", '-DSOURCE_DIGEST="none"')
    subprocess.run([*_compiler(), *flags, "-o", program, source, *linked, "-lm", "-lpthread"], check=True)
    return program


def _fault(work: Path, name: str) -> Iterator[tuple[str, dict[str, int]]]:
    """Reports of a C check with a fault."""
    fault, sanitizer, folder = FAULTS[name], SANITIZERS[name], work / "fault"
    shutil.copytree(_SOURCE / _NATIVE, folder, ignore=shutil.ignore_patterns("*.so", "*.py"), dirs_exist_ok=True)
    content = (folder / fault.file).read_text()
    assert content.count(fault.text) == 1, f"{fault.file} has changed: FAULTS needs another text than {fault.text}"
    (folder / fault.file).write_text(content.replace(fault.text, fault.instead))
    sources = [str(folder / source) for source in fault.sources]
    program = _compiled_check(work, sanitizer, fault.check, folder, sources, "fault_check")
    reports = work / "fault-reports"
    _ran([str(program), *fault.arguments], _reporting(sanitizer, reports))
    yield f"{fault.file}: {fault.instead}", findings(reports)


def _short_arrays(work: Path) -> Iterator[tuple[str, dict[str, int]]]:
    """Reports of an undamaged program, of which an array ends too early."""
    sanitizer = SANITIZERS["address"]
    folder = build_program(work / "artifacts", *PROGRAMS["delta rule"])
    for kind in SHORTENED:
        reports = f"fault-reports/{kind}"
        try_cases(folder, [{}], environment_of(sanitizer, work, reports), ("--heap", kind))
        yield f"short {kind}", findings(work / reports)


def _fuzzed(
    work: Path, name: str, environment: Mapping[str, str], cases: int, seed: int
) -> Iterator[tuple[str, dict[str, object]]]:
    options = ("--heap",) if name == "address" else ()
    for artifact, (recipe, checkpoint) in PROGRAMS.items():
        began = time.monotonic()
        folder = build_program(work / "artifacts", recipe, checkpoint)
        every = itertools.chain(*kept_cases(artifact).values(), Damager(folder).cases(seed, cases))
        trial = try_cases(folder, every, environment, options)
        for one in trial.findings:
            print(artifact, json.dumps(one.case), one.message, sep="\n", file=sys.stderr)
        yield artifact, {**trial.summary(), "seconds": round(time.monotonic() - began, 1)}


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CC", "")) or [next(filter(shutil.which, ("cc", "gcc", "clang")), "cc")]


def _version() -> str:
    done = subprocess.run([*_compiler(), "--version"], capture_output=True, text=True, check=True)
    return done.stdout.partition("\n")[0]


def _preloaded(library: str) -> str:
    """The sanitizer's library, which must be loaded before Python's."""
    compiler = _compiler()
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
