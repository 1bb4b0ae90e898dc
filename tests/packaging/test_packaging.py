"""The symlinked layout survives packaging: sdist and wheel hold every module and data file of the tree."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.data_paths import ROOT

FOLDERS = ("recipes", "pipeline", "passes", "runtime", "validation", "kernels")
SUFFIXES = {".py", ".yaml", ".c", ".h", ".jinja"}


def shipped_files() -> set[str]:
    """Files of the tree that must be in the wheel, as wheel paths."""
    own = {
        f"ingot/{p.relative_to(ROOT / 'src/ingot')}" for p in (ROOT / "src/ingot").rglob("*") if p.suffix in SUFFIXES
    }
    linked = {f"ingot/{p.relative_to(ROOT)}" for d in FOLDERS for p in (ROOT / d).rglob("*") if p.suffix in SUFFIXES}
    return own | linked


@pytest.mark.slow
def test_sdist_makes_a_wheel_with_every_module(tmp_path: Path) -> None:
    pytest.importorskip("build", reason="needs the dev group (pip install --group dev)")
    subprocess.run(
        [sys.executable, "-m", "build", "--sdist", "--outdir", str(tmp_path), str(ROOT)],
        check=True,
        capture_output=True,
    )
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = (entry for entry in tmp_path.iterdir() if entry.is_dir())
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path), str(source)],
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert shipped_files() - names == set()
    assert not any(name.split("/")[0] in FOLDERS for name in names), "a folder ships under its bare name"
