"""The build hook: what the compiler and the environment make of a wheel."""

import ctypes
import importlib
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from tests.data_paths import ROOT

NATIVE = ROOT / "runtime/cpu/native"


@pytest.fixture
def hook() -> ModuleType:
    pytest.importorskip("hatchling", reason="needs the dev group (pip install --group dev)")
    return importlib.import_module("hatch_build")


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CC", "CFLAGS", "LDFLAGS", "INGOT_WHEEL_PLATFORM"):
        monkeypatch.delenv(name, raising=False)


def build_wheel(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_without_a_compiler_the_problem_is_named(
    hook: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no C compiler was found" in hook.compile_library(NATIVE, tmp_path / "library.so")
    monkeypatch.setenv("CC", "nocc -O3")
    problem = hook.compile_library(NATIVE, tmp_path / "library.so")
    assert problem == "nocc: No such file or directory"
    monkeypatch.setenv("CFLAGS", "-DNAME='unclosed")
    assert "CFLAGS or LDFLAGS" in hook.compile_library(NATIVE, tmp_path / "library.so")


def test_what_the_compiler_says_is_reported(hook: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "wrong.c").write_text("int main(void) { return missing; }\n")
    problem = hook.compile_library(tmp_path, tmp_path / "library.so")
    if "no C compiler" in problem:
        pytest.skip(problem)
    assert "wrong.c" in problem
    assert "missing" in problem
    assert not (tmp_path / "library.so").exists()


def test_the_library_takes_the_place_of_the_one_in_the_tree(hook: ModuleType, tmp_path: Path) -> None:
    """A small one: test_install.py and test_release_wheels.py compile and load the CPU engine's."""
    (tmp_path / "number.c").write_text("int number(void) { return 7; }\n")
    problem = hook.compile_library(tmp_path, tmp_path / "new.so")
    if problem is not None:
        pytest.skip(problem)
    (tmp_path / "ingot_cpu.so").write_bytes(b"old")
    hook.replace_library(tmp_path / "ingot_cpu.so", tmp_path / "new.so")
    assert ctypes.CDLL(str(tmp_path / "ingot_cpu.so")).number() == 7
    hook.replace_library(tmp_path / "ingot_cpu.so", tmp_path / "not-built.so")
    assert not (tmp_path / "ingot_cpu.so").exists()


@pytest.mark.usefixtures("hook")
def test_a_wheel_without_a_library_is_for_every_platform(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "nocc")
    built = build_wheel(tmp_path)
    assert (
        "attention will be computed in numpy, several times slower: nocc: No such file" in built.stdout + built.stderr
    )
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert not any(name.endswith(".so") for name in archive.namelist())


@pytest.mark.usefixtures("hook")
def test_a_wheel_to_publish_needs_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "nocc")
    monkeypatch.setenv("INGOT_WHEEL_PLATFORM", "manylinux_2_28_riscv64")
    built = build_wheel(tmp_path)
    assert built.returncode != 0
    expected = "INGOT_WHEEL_PLATFORM is manylinux_2_28_riscv64, but the library was not built: nocc: No such file"
    assert expected in built.stdout + built.stderr
    assert not any(tmp_path.iterdir())
