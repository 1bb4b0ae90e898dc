"""The compiler of the tests compiles again when anything changed that an object depends on, and only then."""

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packaging import compile_once


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "number.h").write_text("#define NUMBER 7\n")
    (folder / "number.c").write_text('#include "number.h"\nint number(void) { return NUMBER + OFFSET; }\n')
    return folder


@pytest.fixture
def compiler(tmp_path: Path) -> Path:
    """A compiler that notes its runs, but not those of its preprocessor, in runs.txt."""
    real = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if real is None:
        pytest.skip("needs a C compiler")
    script = tmp_path / "compiler"
    script.write_text(
        f'#!/bin/sh\ncase " $* " in *" -E "*) ;; *) echo x >> "{tmp_path}/runs.txt" ;; esac\nexec {real} "$@"\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script


def test_an_object_is_compiled_again_when_what_it_depends_on_changed(
    sources: Path, compiler: Path, tmp_path: Path
) -> None:
    runs = tmp_path / "runs.txt"

    def compiled(*flags: str, folder: Path = sources) -> tuple[int, bytes]:
        """The number of compilations so far, and the object."""
        made = tmp_path / "made.o"
        made.unlink(missing_ok=True)
        command = [sys.executable, compile_once.__file__, str(compiler), *flags, "-c", "-o", str(made)]
        environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
        subprocess.run([*command, str(folder / "number.c")], env=environment, check=True)
        return len(runs.read_text().split()), made.read_bytes()

    count, first = compiled("-O2", "-DOFFSET=1")
    assert count == 1
    assert compiled("-O2", "-DOFFSET=1") == (1, first)
    assert compiled("-O2", "-DOFFSET=1", "-DUNUSED") == (1, first), "a macro that the source does not use"
    copied = shutil.copytree(sources, tmp_path / "copied")
    assert compiled("-O2", "-DOFFSET=1", folder=copied) == (1, first), "the same source in another folder"
    count, other = compiled("-O2", "-DOFFSET=2")
    assert count == 2
    assert other != first
    assert compiled("-O0", "-DOFFSET=1")[0] == 3
    (sources / "number.h").write_text("#define NUMBER 8\n")
    count, changed = compiled("-O2", "-DOFFSET=1")
    assert count == 4
    assert changed != first
    compiler.write_text(compiler.read_text() + "# a newer one\n")
    assert compiled("-O2", "-DOFFSET=1") == (5, changed)
    assert len(list((tmp_path / "cache/ingot/test-objects").iterdir())) == 5


def test_what_fails_fails_with_the_compilers_words_and_nothing_is_kept(
    sources: Path, compiler: Path, tmp_path: Path
) -> None:
    command = [sys.executable, compile_once.__file__, str(compiler), "-c", "-o", str(tmp_path / "made.o")]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    for text, said in (("int number(void) { return missing; }\n", "missing"), ('#include "absent.h"\n', "absent.h")):
        (sources / "number.c").write_text(text)
        done = subprocess.run([*command, str(sources / "number.c")], env=environment, capture_output=True, text=True)
        assert done.returncode != 0
        assert said in done.stderr
    assert not (tmp_path / "cache").exists()


def test_objects_that_were_not_used_for_long_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_once, "KEPT", 2)
    made = tmp_path / "made.o"
    made.write_bytes(b"object")
    for number in range(3):
        kept = tmp_path / "kept" / f"{number}.o"
        compile_once._keep(made, kept)
        os.utime(kept, (number, number))
    assert {file.name for file in (tmp_path / "kept").iterdir()} == {"1.o", "2.o"}
