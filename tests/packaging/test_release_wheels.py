"""The wheels of `make wheel`: zig compiles their library. It needs nothing newer than its tag says; same bits."""

import ctypes
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ingot.runtime.cpu.native import attention
from ingot.runtime.cpu.native.attention import isa_in_use, use_isa
from ingot.runtime.cpu.native.library import load_library, native_library
from tests.conftest import locked
from tests.data_paths import ROOT
from tests.packaging.compile_once import as_cc
from tests.runtime.cpu.native.attention_cases import SHAPES, run_alone

GLIBC = (2, 28)
LIBRARY = "ingot/runtime/cpu/native/ingot_cpu.so"
ZIG_TARGETS = {  # of the Makefile's PLATFORMS
    "manylinux_2_28_x86_64": "x86_64-linux-gnu.2.28",
    "manylinux_2_28_aarch64": "aarch64-linux-gnu.2.28",
    "musllinux_1_2_x86_64": "x86_64-linux-musl",
    "musllinux_1_2_aarch64": "aarch64-linux-musl",
}
ARM_LIBRARIES = Path("/usr/aarch64-linux-gnu")  # of Debian's libc6-arm64-cross


@pytest.fixture(scope="session")
def release_wheel(folder_of_run: Path) -> Callable[[str], Path]:
    """release_wheel(platform) -> a wheel built as `make wheel` does, once for all workers."""

    def make(platform: str) -> Path:
        pytest.importorskip("ziglang", reason="needs the wheel group (pip install --group wheel)")
        folder = folder_of_run / f"wheel-{platform}"
        with locked(folder.with_suffix(".lock")):
            if not any(folder.glob("*.whl")):
                build_wheel(folder, **as_cc(zig(platform)), INGOT_WHEEL_PLATFORM=platform)
            (wheel,) = folder.glob("*.whl")
        return wheel

    return make


def zig(platform: str) -> list[str]:
    return [sys.executable, "-m", "ziglang", "cc", "-target", ZIG_TARGETS[platform]]


def build_wheel(folder: Path, **environment: str) -> Path:
    pytest.importorskip("hatchling", reason="needs the dev group (pip install --group dev)")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, check=True, capture_output=True)
    (wheel,) = folder.glob("ingot_llm-*-py3-none-*.whl")
    return wheel


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["x86_64", "aarch64"])
def test_the_wheel_needs_no_newer_glibc_than_its_tag_says(
    release_wheel: Callable[[str], Path], architecture: str
) -> None:
    pytest.importorskip("auditwheel", reason="needs the wheel group (pip install --group wheel)")
    wheel = release_wheel(f"manylinux_2_28_{architecture}")
    assert wheel.name.endswith(f"-manylinux_2_28_{architecture}.whl")
    command = [sys.executable, "-m", "auditwheel", "show", str(wheel)]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    oldest = re.search(rf'"manylinux_(\d+)_(\d+)_{architecture}"', shown)
    assert oldest is not None, shown
    assert tuple(map(int, oldest.groups())) <= GLIBC


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["x86_64", "aarch64"])
def test_the_wheel_for_musl_needs_its_libc_alone(
    release_wheel: Callable[[str], Path], tmp_path: Path, architecture: str
) -> None:
    elffile = pytest.importorskip("elftools.elf.elffile", reason="needs the wheel group (pip install --group wheel)")
    wheel = release_wheel(f"musllinux_1_2_{architecture}")
    assert wheel.name.endswith(f"-musllinux_1_2_{architecture}.whl")
    with library_of(wheel, tmp_path).open("rb") as file:
        elf = elffile.ELFFile(file)
        needed = [tag.needed for tag in elf.get_section_by_name(".dynamic").iter_tags("DT_NEEDED")]
        assert needed == ["libc.so"]  # musl's loader takes itself for it, however its file is named
        assert elf.get_section_by_name(".gnu.version_r") is None
        assert elf.get_machine_arch() == {"x86_64": "x64", "aarch64": "AArch64"}[architecture]


@pytest.mark.slow
@pytest.mark.parametrize("wheel_platform", ["manylinux_2_28_x86_64", "musllinux_1_2_x86_64", "manylinux_2_28_aarch64"])
def test_the_kernels_of_the_wheel_equal_the_portable_ones(
    release_wheel: Callable[[str], Path], tmp_path: Path, wheel_platform: str
) -> None:
    start = how_to_run(wheel_platform)
    library = library_of(release_wheel(wheel_platform), tmp_path)
    check = [
        *zig(wheel_platform),
        "-dynamic",
        "-O2",  # else zig adds checks of its own, which need a newer musl
        "-std=gnu11",
        f"-I{ROOT / 'runtime/cpu/native'}",
        "-o",
        str(tmp_path / "check"),
    ]
    source = ROOT / "tests/runtime/cpu/native/kernels_check.c"
    subprocess.run([*check, str(source), str(library), f"-Wl,-rpath,{library.parent}", "-lm"], check=True)
    done = subprocess.run([*start, str(tmp_path / "check"), "50", "3"], check=True, capture_output=True, text=True)
    assert done.stdout.split()[-1] == "portable"
    if wheel_platform.endswith("aarch64"):
        assert done.stdout.split()[0] == "neon-i8mm"


def how_to_run(wheel_platform: str) -> list[str]:
    """Start of a command that runs a program for the platform here."""
    if wheel_platform.endswith("aarch64") and platform.machine() != "aarch64":
        if shutil.which("qemu-aarch64") is None or not ARM_LIBRARIES.exists():
            pytest.skip("needs an emulator and libraries of Arm (apt-get install qemu-user libc6-arm64-cross)")
        return ["qemu-aarch64", "-cpu", "max", "-L", str(ARM_LIBRARIES)]
    if not wheel_platform.endswith(platform.machine()):
        pytest.skip(f"needs {wheel_platform.split('_', 3)[-1]}")
    if wheel_platform.startswith("musllinux") and not Path(f"/lib/ld-musl-{platform.machine()}.so.1").exists():
        pytest.skip("needs musl (apt-get install musl)")
    return []


def library_of(wheel: Path, folder: Path) -> Path:
    """The library, taken out of the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(LIBRARY, folder))


@pytest.mark.slow
def test_the_bits_do_not_depend_on_the_compiler(
    release_wheel: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_same_bits(release_wheel(f"manylinux_2_28_{platform.machine()}"), tmp_path, monkeypatch)


@pytest.mark.slow
def test_the_bits_do_not_depend_on_flags_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = build_wheel(tmp_path, **as_cc(), CFLAGS="-Ofast -ffast-math")
    require_same_bits(wheel, tmp_path, monkeypatch)
    assert np.float32(1e-38) * np.float32(0.1) > 0, "to load it makes the process flush subnormal numbers"


def require_same_bits(wheel: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = native_library()
    if local is None:
        pytest.skip("the kernel was not built")
    built = load_library(library_of(wheel, folder))
    fastest = [isa_of(library, monkeypatch) for library in (local, built)]
    assert fastest[0] == fastest[1], "one build does not find this CPU's instructions"
    for isa in ("avx512", "avx2", "baseline"):
        assert outputs(local, isa, monkeypatch) == outputs(built, isa, monkeypatch)


def isa_of(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> str:
    with monkeypatch.context() as patch:
        patch.setattr(attention, "native_library", lambda: library)
        return isa_in_use()


def outputs(library: ctypes.CDLL, isa: str, monkeypatch: pytest.MonkeyPatch) -> list[bytes] | None:
    """All shapes' outputs with this instruction set; None where the CPU lacks it."""
    with monkeypatch.context() as patch:
        patch.setattr(attention, "native_library", lambda: library)
        before = isa_in_use()
        if not use_isa(isa):
            return None
        found = [x.tobytes() for case in SHAPES for x in run_alone(case, attention.NativeAttention(case.pool(), 2))]
        assert use_isa(before)
        return found
