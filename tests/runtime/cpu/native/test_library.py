"""The compiled library: which file it is, and what is refused."""

import platform
import shutil
from pathlib import Path

import pytest

from ingot.errors import EngineError
from ingot.runtime.cpu.native import library as under_test
from ingot.runtime.cpu.native.library import LIBRARY, library_file, load_library

FOLDER = Path(under_test.__file__).parent


def test_the_library_is_found_where_it_was_built(tmp_path: Path) -> None:
    assert library_file(tmp_path) is None
    (tmp_path / LIBRARY).touch()
    assert library_file(tmp_path) == tmp_path / LIBRARY


def test_a_damaged_library_is_named(tmp_path: Path) -> None:
    damaged = tmp_path / "ingot_cpu.so"
    damaged.write_bytes(b"not a library")
    with pytest.raises(EngineError, match=r"ingot_cpu.so: does not load .* install Ingot again on this machine"):
        load_library(damaged)


def test_a_library_for_another_machine_is_named(tmp_path: Path) -> None:
    built = library_file(FOLDER)
    if built is None or built.read_bytes()[:4] != b"\x7fELF":
        pytest.skip("there is no library, or it is not an ELF file")
    content = bytearray(built.read_bytes())
    content[18:20] = (243).to_bytes(2, "little")  # e_machine: RISC-V
    library = tmp_path / LIBRARY
    library.write_bytes(content)
    with pytest.raises(EngineError, match=rf"{LIBRARY}: does not load .*this machine \(.*, {platform.machine()}\)"):
        load_library(library)


def test_a_library_of_other_sources_is_refused(tmp_path: Path) -> None:
    built = library_file(FOLDER)
    if built is None:
        pytest.skip("the library was not compiled")
    library = Path(shutil.copy(built, tmp_path))
    load_library(library)  # no sources are next to it, as in a wheel
    for source in ("paged_attention.c", "kv_precision.h"):
        shutil.copy(FOLDER / source, tmp_path)
    with pytest.raises(EngineError, match="another version of its source; install Ingot again"):
        load_library(library)
