"""Every kernel is within its limit of float64 in every type, and an error is counted in roundings of its magnitude."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from benchmarks.cpu import kernel_errors
from benchmarks.cpu.kernel_errors import UNIT, Exact, KernelError, error_table

from tests.runtime.cpu.native.attention_cases import PRECISIONS, ROUNDED, SHAPES
from tests.runtime.cpu.native.kernel_cases import FORMS, SETS, needs_library


@needs_library
def test_every_kernel_and_type_is_within_its_limit() -> None:
    cases = [*SHAPES[:3], *ROUNDED[:: len(ROUNDED) // len(PRECISIONS)]]
    errors = [
        *kernel_errors.matmuls([160]),
        *kernel_errors.norms(),
        *kernel_errors.elementwise(),
        *kernel_errors.embeddings(),
        *kernel_errors.attentions(cases),
    ]
    assert not [one for one in errors if not one.error <= one.limit]
    assert {one.kernel for one in errors} == set(kernel_errors.LIMITS)
    for kernel in ("matmul", "embedding"):
        found = {(one.precision, one.isa) for one in errors if one.kernel == kernel}
        assert found == {(form, isa) for form in FORMS for isa in SETS}
    attended = {one.precision for one in errors if one.kernel == "attention"}
    assert attended == {"float32", *(dtype for dtype, _ in PRECISIONS)}
    inexact = {one.kernel for one in errors if one.error > 0}
    assert inexact == set(kernel_errors.LIMITS)


def test_an_error_is_in_units_of_its_magnitude() -> None:
    got = np.array([1 + 2.0**-22, 0.0], np.float32)
    assert Exact(np.array([1.0, 0.0])).error(got) == 4
    assert Exact(np.array([1.0, 0.0]), np.array([2.0, 1.0])).error(got) == 2
    assert Exact(np.array([1.0, UNIT]), np.array([8.0, 0.5])).error(got) == 2
    assert np.isnan(Exact(np.array([1.0])).error(np.array([np.nan], np.float32)))


def test_the_table_has_the_worst_case_of_each_kernel_and_type() -> None:
    errors = [
        KernelError("matmul", "int4", "first", "portable", 1.5),
        KernelError("matmul", "int4", "second", "avx2", 2.5),
        KernelError("embedding", "int4", "third", "avx2", 0.5),
    ]
    assert error_table(errors).splitlines()[2:] == [
        "| matmul | int4 | 2.5 u | 8 | second (avx2) |",
        "| embedding | int4 | 0.5 u | 2 | third (avx2) |",
    ]


@needs_library
def test_an_error_beyond_its_limit_is_written_and_ends_in_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = KernelError("norm", "float32", "one", "portable", 9.0)
    for name in ("matmuls", "elementwise", "embeddings", "attentions"):
        monkeypatch.setattr(kernel_errors, name, list)
    monkeypatch.setattr(kernel_errors, "norms", lambda: [far])
    monkeypatch.setattr("sys.argv", ["kernel_errors", "--output", str(tmp_path / "errors.json")])
    with pytest.raises(SystemExit, match=r"1 errors are beyond their kernel's limit, the first: .*'norm'"):
        kernel_errors.main()
    written = json.loads((tmp_path / "errors.json").read_text())
    assert written["errors"] == [{**asdict(far), "limit": far.limit}]
