"""The symlinked layout survives packaging: sdist and wheel hold every module and data file of the tree."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.data_paths import ROOT
from tests.packaging.compile_once import as_cc

FOLDERS = ("recipes", "pipeline", "passes", "planning", "runtime", "validation", "kernels")
SUFFIXES = {".py", ".yaml", ".json", ".jinja", ".onnx", ".typed"}
SOURCES = {".c", ".h"}


def tree_files(suffixes: set[str]) -> set[str]:
    """Files of the tree with these suffixes, as wheel paths."""
    own = {
        f"ingot/{p.relative_to(ROOT / 'src/ingot')}" for p in (ROOT / "src/ingot").rglob("*") if p.suffix in suffixes
    }
    linked = {f"ingot/{p.relative_to(ROOT)}" for d in FOLDERS for p in (ROOT / d).rglob("*") if p.suffix in suffixes}
    return own | linked


def run_build(*arguments: str) -> None:
    """With the build backend of this environment; `make` installs Ingot with one of its own."""
    command = [sys.executable, "-m", "build", "--no-isolation", *arguments]
    subprocess.run(command, env={**os.environ, **as_cc()}, check=True, capture_output=True)


def require_build_package() -> None:
    """Skip without the package `build`. A folder of that name can be imported too, but has no modules."""
    pytest.importorskip("build.env", reason="needs the dev group (pip install --group dev)")


def test_a_leftover_build_folder_does_not_pass_for_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "build").mkdir()
    for name in [name for name in sys.modules if name.split(".")[0] == "build"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(pytest.skip.Exception, match="needs the dev group"):
        require_build_package()
    del sys.modules["build"]


@pytest.mark.slow
def test_sdist_makes_a_wheel_with_every_module(tmp_path: Path) -> None:
    require_build_package()
    pytest.importorskip("hatchling", reason="needs the dev group (pip install --group dev)")
    run_build("--sdist", "--outdir", str(tmp_path), str(ROOT))
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = (entry for entry in tmp_path.iterdir() if entry.is_dir())
    assert {name for name in tree_files(SUFFIXES | SOURCES) if not (source / "src" / name).is_file()} == set()
    run_build("--wheel", "--outdir", str(tmp_path), str(source))
    (wheel,) = tmp_path.glob("ingot_llm-*-py3-none-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert tree_files(SUFFIXES) - names == set()
    assert not any(name.split("/")[0] in FOLDERS for name in names), "a folder ships under its bare name"
    assert not any(Path(name).suffix in SOURCES for name in names), "the wheel holds what only a build needs"
    has_library = "ingot/runtime/cpu/native/ingot_cpu.so" in names
    assert has_library == ("-none-any" not in wheel.name), "the tag names a platform where a library is in the wheel"
