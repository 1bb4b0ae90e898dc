"""The bandwidth probe compiles and reads; how fast is nobody's test."""

import shutil

import pytest
from benchmarks.bandwidth import measure_read_bandwidth


def test_it_reads_with_two_threads() -> None:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    assert measure_read_bandwidth(2, repeats=1, buffer_bytes=1 << 20) > 0


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import bandwidth

    bandwidth._compiled.cache_clear()
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(RuntimeError, match="no C compiler 'no-such-compiler'"):
        measure_read_bandwidth(1, repeats=1, buffer_bytes=1 << 20)
