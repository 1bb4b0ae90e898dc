"""The wheels of `make wheel`: zig compiles their kernel; it needs no newer glibc, and the bits are the same."""

import ctypes
import os
import platform
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from ingot.runtime.cpu.native import attention
from ingot.runtime.cpu.native.attention import isa_in_use, use_isa
from ingot.runtime.cpu.native.library import load_library, native_library
from tests.conftest import locked
from tests.data_paths import ROOT
from tests.runtime.cpu.native.attention_cases import SHAPES, run_alone

GLIBC = (2, 28)
LIBRARY = "ingot/runtime/cpu/native/ingot_cpu.so"


@pytest.fixture(scope="session")
def release_wheel(folder_of_run: Path) -> Callable[[str], Path]:
    """release_wheel(architecture) -> a wheel built as `make wheel` does, once for all workers."""

    def make(architecture: str) -> Path:
        pytest.importorskip("ziglang", reason="needs the wheel group (pip install --group wheel)")
        folder = folder_of_run / f"wheel-{architecture}"
        target = f"{architecture}-linux-gnu.{'.'.join(map(str, GLIBC))}"
        with locked(folder.with_suffix(".lock")):
            if not any(folder.glob("*.whl")):
                build_wheel(
                    folder,
                    CC=f"{sys.executable} -m ziglang cc -target {target}",
                    INGOT_WHEEL_PLATFORM=f"manylinux_2_28_{architecture}",
                )
            (wheel,) = folder.glob("*.whl")
        return wheel

    return make


def build_wheel(folder: Path, **environment: str) -> Path:
    pytest.importorskip("hatchling", reason="needs the dev group (pip install --group dev)")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, check=True, capture_output=True)
    (wheel,) = folder.glob("ingot-*-py3-none-*.whl")
    return wheel


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["x86_64", "aarch64"])
def test_the_wheel_needs_no_newer_glibc_than_its_tag_says(
    release_wheel: Callable[[str], Path], architecture: str
) -> None:
    pytest.importorskip("auditwheel", reason="needs the wheel group (pip install --group wheel)")
    wheel = release_wheel(architecture)
    assert wheel.name.endswith(f"-manylinux_2_28_{architecture}.whl")
    command = [sys.executable, "-m", "auditwheel", "show", str(wheel)]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    oldest = re.search(rf'"manylinux_(\d+)_(\d+)_{architecture}"', shown)
    assert oldest is not None, shown
    assert tuple(map(int, oldest.groups())) <= GLIBC


@pytest.mark.slow
def test_the_bits_do_not_depend_on_the_compiler(
    release_wheel: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_same_bits(release_wheel(platform.machine()), tmp_path, monkeypatch)


@pytest.mark.slow
def test_the_bits_do_not_depend_on_flags_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_same_bits(build_wheel(tmp_path, CFLAGS="-Ofast -ffast-math"), tmp_path, monkeypatch)


def require_same_bits(wheel: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = native_library()
    if local is None:
        pytest.skip("the kernel was not built")
    with zipfile.ZipFile(wheel) as archive:
        built = load_library(Path(archive.extract(LIBRARY, folder)))
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
