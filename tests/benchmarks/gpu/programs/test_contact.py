"""The folder for the GPU's machine has what runs there, no other data, and a limit."""

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from benchmarks.gpu.parts import COMMIT_FILE
from benchmarks.gpu.programs import contact
from benchmarks.gpu.programs.contact import copy_sources, needed, write_contact


def test_data_that_the_machine_does_not_need_stays_behind() -> None:
    taken = [
        "src/ingot/__init__.py",
        "examples/models/stdlib-llama-6m/config.json",
        "tests/fixtures/checkpoints/llama/config.json",
    ]
    left = [
        "docs/cuda.md",
        "examples/models/stdlib-hybrid-4m/config.json",
        "tests/fixtures/checkpoints/gpt2/config.json",
    ]
    assert needed([*taken, *left, "benchmarks/results/one.json"]) == taken


def test_tests_marked_gpu_are_collected_from_the_copy(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="the tests of kernels are written in Triton: pip install --group oracle")
    copy_sources(tmp_path / "copy")
    assert (tmp_path / "copy" / "src" / "ingot" / "passes").is_symlink()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(["src", "."])}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-m", "gpu", "tests/gpu"],
        cwd=tmp_path / "copy",
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_kernels_on_gpu.py" in done.stdout


def test_the_folder_is_written_anew_says_its_size_and_is_refused_over_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    packed, folder = tmp_path / "packed", tmp_path / "contact"
    packed.mkdir()
    (packed / "one.zip").write_bytes(bytes(3 << 20))
    write_contact(packed, folder)
    assert f"{folder}: " in (said := capsys.readouterr().out)
    assert "3.0 of them packed programs" in said
    assert "PYTHONPATH=src python3 -m benchmarks.gpu --output results" in said
    assert (folder / "benchmarks" / "gpu-programs" / "one.zip").stat().st_size == 3 << 20
    (folder / "old").touch()
    monkeypatch.setattr(contact, "MOST_BYTES", 2 << 20)
    with pytest.raises(click.ClickException, match="that is more than 2 MiB; pack less"):
        write_contact(packed, folder)
    assert not (folder / "old").exists()
    (folder / COMMIT_FILE).unlink()
    with pytest.raises(click.ClickException, match="was not written by this command; choose another --contact"):
        write_contact(packed, folder)
