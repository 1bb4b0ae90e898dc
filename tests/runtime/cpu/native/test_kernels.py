"""Every table of kernels equals the portable one bit for bit: those of this CPU, and those of Arm in an emulator."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ingot.runtime.cpu import native
from ingot.runtime.cpu.native.library import LIBRARY
from tests.conftest import locked
from tests.packaging import compile_once
from tests.runtime.cpu.native.kernel_cases import SETS, needs_library

NATIVE = Path(native.__file__).parent
CHECK = Path(__file__).parent / "kernels_check.c"
CPUS = {
    "cortex-a57": ("neon", "portable"),
    "neoverse-n1": ("neon-dotprod", "neon", "portable"),
    "max": ("neon-i8mm", "neon-dotprod", "neon", "portable"),
}
TARGETS = ("x86_64-linux-gnu", "x86_64-linux-musl", "aarch64-linux-gnu", "aarch64-linux-musl", "aarch64-macos")
STRICT = ("-std=gnu11", "-Wall", "-Wextra", "-Werror", f"-I{NATIVE}", '-DSOURCE_DIGEST="none"')


def compile_with(command: list[str]) -> None:
    """Run a compiler; the test fails with what it says."""
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def tables_that_agree(command: list[str], cases: int, seed: int) -> tuple[str, ...]:
    """Names of the tables that kernels_check found equal to the portable one; fails where one is not."""
    done = subprocess.run([*command, str(cases), str(seed)], capture_output=True, text=True)
    if "unable to find CPU model" in done.stderr:
        pytest.skip("needs a newer qemu, of 7.1 or later")
    assert done.returncode == 0, done.stderr
    return tuple(done.stdout.split())


@needs_library
def test_every_table_of_this_cpu_equals_the_portable_one(tmp_path: Path) -> None:
    compiler = next(filter(shutil.which, ("cc", "gcc", "clang")), None)
    if compiler is None:
        pytest.skip("needs a C compiler")
    program = tmp_path / "kernels_check"
    library = NATIVE / LIBRARY
    compile_with([compiler, *STRICT, "-o", str(program), str(CHECK), str(library), f"-Wl,-rpath,{NATIVE}", "-lm"])
    assert tables_that_agree([str(program)], 300, seed=1) == SETS
    assert SETS[-1] == "portable"


@pytest.fixture(scope="session")
def arm_program(folder_of_run: Path) -> Path:
    """kernels_check for aarch64 by gcc, without shared libraries; compiled once for all workers."""
    if shutil.which("qemu-aarch64") is None:
        pytest.skip("needs qemu-aarch64 (apt-get install qemu-user)")
    compiler = shutil.which("aarch64-linux-gnu-gcc")
    if compiler is None:
        pytest.skip("needs aarch64-linux-gnu-gcc (apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross)")
    program = folder_of_run / "kernels_check-aarch64"
    with locked(program.with_suffix(".lock")):
        if not program.exists():
            flags = ("-O3", "-ffp-contract=off", "-fno-math-errno")  # of hatch_build.py
            objects = [str(program.with_suffix(suffix)) for suffix in (".check.o", ".kernels.o")]
            for source, made in zip((CHECK, NATIVE / "kernels.c"), objects, strict=True):
                once = (sys.executable, compile_once.__file__, compiler)
                compile_with([*once, *STRICT, *flags, "-c", "-o", made, str(source)])
            compile_with([compiler, "-static", "-o", str(program), *objects, "-lm"])
    return program


@pytest.mark.slow
@pytest.mark.parametrize("cpu", CPUS)
def test_every_table_of_arm_equals_the_portable_one(arm_program: Path, cpu: str) -> None:
    cases = 100 if cpu == "max" else 5  # it has all the tables; others show which are chosen without its instructions
    assert tables_that_agree(["qemu-aarch64", "-cpu", cpu, str(arm_program)], cases, seed=2) == CPUS[cpu]


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_clang_has_no_warning_for_any_platform(tmp_path: Path, target: str) -> None:
    pytest.importorskip("ziglang", reason="needs the wheel group (pip install --group wheel)")
    zig = (sys.executable, "-m", "ziglang", "cc", "-target", target, "-Wno-unused-command-line-argument")
    only_parse = ("-S", "-emit-llvm", "-O0", "-Xclang", "-disable-llvm-passes", "-o", str(tmp_path / "code"))
    for source in sorted(NATIVE.glob("*.c")):
        compile_with([*zig, *STRICT, *only_parse, str(source)])
