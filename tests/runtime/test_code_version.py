"""The version of an executor's Python code, which is part of the keys of blocks."""

from pathlib import Path

import ingot
from ingot.runtime.code_version import code_version


def sources(folder: Path, files: dict[str, str]) -> Path:
    """A folder with these files."""
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


def test_every_change_of_a_source_changes_it_and_other_files_do_not(tmp_path: Path) -> None:
    files = {"a.py": "x = 1", "native/b.py": "y = 2"}
    version = code_version(sources(tmp_path / "original", files))
    others = {
        "an edit": files | {"native/b.py": "y = 3"},
        "a new file": files | {"c.py": ""},
        "another name": {"a.py": "x = 1", "native/c.py": "y = 2"},
        "a shifted border": {"a.py": "x = 1native/b.py", "b.py": "y = 2"},
    }
    found = {version, *(code_version(sources(tmp_path / name, each)) for name, each in others.items())}
    assert len(found) == 1 + len(others)
    assert code_version(sources(tmp_path / "equal", files | {"notes.txt": "", "library.so": "1"})) == version


def test_it_names_the_version_of_the_package(tmp_path: Path) -> None:
    assert code_version(tmp_path).startswith(f"ingot {ingot.__version__} ")
