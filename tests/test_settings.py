"""What the environment sets is refused by name when it cannot be."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ingot import settings
from ingot.errors import UsageError


def test_threads_are_what_the_environment_says_else_at_least_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INGOT_THREADS", raising=False)
    assert 1 <= settings.num_threads() <= settings.MAX_THREADS
    monkeypatch.setenv("INGOT_THREADS", "3")
    assert settings.num_threads() == 3


@pytest.mark.parametrize("text", ["0", "-1", "two", "", "100000"])
def test_a_number_of_threads_that_cannot_be_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INGOT_THREADS", text)
    with pytest.raises(UsageError, match=f"INGOT_THREADS is '{text}'; it must be a whole number from 1 to 256"):
        settings.num_threads()


def test_kernels_are_waited_for_only_where_that_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INGOT_CUDA_BLOCKING", raising=False)
    assert not settings.cuda_blocking()
    monkeypatch.setenv("INGOT_CUDA_BLOCKING", "1")
    assert settings.cuda_blocking()
    monkeypatch.setenv("INGOT_CUDA_BLOCKING", "yes")
    with pytest.raises(UsageError, match="INGOT_CUDA_BLOCKING is 'yes'; it must be 0 or 1"):
        settings.cuda_blocking()


def test_a_library_may_multiply_unless_the_environment_says_no(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INGOT_CUBLASLT", raising=False)
    assert settings.cublaslt()
    monkeypatch.setenv("INGOT_CUBLASLT", "0")
    assert not settings.cublaslt()
    monkeypatch.setenv("INGOT_CUBLASLT", "no")
    with pytest.raises(UsageError, match="INGOT_CUBLASLT is 'no'; it must be 0 or 1"):
        settings.cublaslt()


def test_the_cache_is_where_the_environment_says_else_in_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("INGOT_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert settings.cache_dir() == tmp_path / ".cache/ingot"
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert settings.cache_dir() == Path("/caches/ingot")
    monkeypatch.setenv("INGOT_CACHE", "/mine")
    assert settings.cache_dir() == Path("/mine")


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary cache of a user whose home folder cannot be written."""

    def access(path: Path, mode: int) -> bool:
        return path != Path("/sys")

    monkeypatch.delenv("INGOT_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/sys/no-home")
    monkeypatch.setattr(os, "access", access)  # root may write everywhere
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    settings._temporary_cache.cache_clear()
    return tmp_path / f"ingot-{os.getuid()}"


def test_a_home_that_is_missing_or_cannot_be_written_has_a_temporary_cache(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    assert settings.cache_dir() == temporary
    assert temporary.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(Path, "home", no_home)
    assert settings.make_cache_dir("baselines") == temporary / "baselines"


def test_a_temporary_cache_that_others_may_write_is_refused(temporary: Path) -> None:
    temporary.mkdir()
    temporary.chmod(0o777)
    with pytest.raises(UsageError, match=r"/sys cannot be written, and others may write to .*; set INGOT_CACHE"):
        settings.cache_dir()
    temporary.rmdir()
    temporary.symlink_to(temporary.parent)
    with pytest.raises(UsageError, match="others may write to"):
        settings.cache_dir()


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INGOT_CACHE", str(tmp_path / "new"))
    assert settings.make_cache_dir("baselines") == tmp_path / "new" / "baselines"
    (tmp_path / "file").touch()
    monkeypatch.setenv("INGOT_CACHE", str(tmp_path / "file"))
    with pytest.raises(UsageError, match="file/baselines: cannot write to the cache: Not a directory; set INGOT_CACHE"):
        settings.make_cache_dir("baselines")
    monkeypatch.setenv("INGOT_CACHE", str(tmp_path / "new"))
    monkeypatch.setattr(os, "access", lambda *_: False)  # as on a read-only file system; root may write everywhere
    with pytest.raises(
        UsageError, match="new/baselines: cannot write to the cache: Permission denied; set INGOT_CACHE"
    ):
        settings.make_cache_dir("baselines")


def test_onnxruntime_neither_sends_telemetry_nor_writes_files_for_it(tmp_path: Path) -> None:
    folders = {"HOME": str(tmp_path), "TMPDIR": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    environment = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}
    code = "import ingot.runtime, onnxruntime; onnxruntime.get_available_providers()"
    subprocess.run([sys.executable, "-c", code], env={**environment, **folders}, check=True)
    assert [path.name for path in tmp_path.rglob("*")] == []
