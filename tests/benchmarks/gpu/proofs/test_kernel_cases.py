"""Caught cases: the kernels compiled for them, and their run on a device of its own memory."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.simulators.triton_interpreter import use_interpreter

use_interpreter()

import torch  # noqa: E402
from benchmarks.gpu.dry_machine import DryMachine  # noqa: E402
from benchmarks.gpu.programs.packing import pack_kernels  # noqa: E402
from benchmarks.gpu.programs.write import described  # noqa: E402
from benchmarks.gpu.proofs.kernel_cases import (  # noqa: E402
    CaseRunner,
    caught,
    is_wide,
    kernels_of,
    launch,
    limit_on_gpu,
    precision_of,
)

from ingot.artifact.programs.launch_program import Kernel  # noqa: E402
from tests.kernels.all_cases import all_cases  # noqa: E402
from tests.kernels.cases import Case  # noqa: E402

CASES = [case for case in all_cases() if case.kernel in ("rotary_kv_write", "matmul", "gather_columns")][::9]


def test_caught_cases_have_the_errors_of_the_interpreter_on_a_device_of_its_own_memory(tmp_path: Path) -> None:
    needed = kernels_of(CASES, narrow=False)
    pack_kernels(needed, described(needed), tmp_path / "c.zip")
    runner = CaseRunner(DryMachine().open, tmp_path / "c.zip")
    for case in CASES:
        with caught(runner.run, narrow=False):
            assert case.errors()[1] <= case.limit, case


def test_kernels_of_experts_are_found_though_none_computes_what_the_next_reads() -> None:
    cases = [case for case in all_cases() if "expert" in case.kernel or case.kernel.startswith("grouped")]
    found = {kernel.name: kernel for kernel in kernels_of(cases, narrow=False).values()}
    assert found.keys() >= {"sort_by_expert", "combine_experts", "grouped_matmul", "grouped_matmul_int4"}
    direct = found["grouped_matmul_int4"]  # compiles for its own number of warps alone
    assert direct.num_warps == direct.constants["WARPS"] != found["grouped_matmul"].num_warps


def test_what_is_float32_and_could_be_16_bits_is_bfloat16_where_it_is_narrowed() -> None:
    rows = torch.arange(32, dtype=torch.float32)
    named = {"input_ids": 0, "x": rows[:16].view(1, 16), "columns": None, "out": rows[16:].view(1, 16)}
    seen: list[tuple[Kernel, Sequence[Any]]] = []

    def run(kernel: Kernel, grid: tuple[int, int, int], values: list[Any]) -> None:
        seen.append((kernel, values))
        values[2].fill_(1.001)

    given = named | {"x_stride": 16, "out_stride": 3, "COLUMNS": 16}
    del given["input_ids"]
    launch("gather_columns", given, (1, 2), run, narrow=True)
    (kernel, values) = seen[0]
    assert kernel.types[:3] == ("*bf16", "*i64", "*bf16")
    assert kernel.aligned == (3,)
    assert values[0].untyped_storage().data_ptr() == values[2].untyped_storage().data_ptr()
    assert set(rows[16:].tolist()) == {1.0}  # 1.001 in 8 bits


def test_limits_on_a_gpu_allow_for_11_and_8_bits() -> None:
    def case(kernel: str, precision: str) -> Case:
        return Case(kernel, "any", precision, 1e-6, lambda: pytest.fail("not run"))

    assert limit_on_gpu(case("matmul", "floats, float32"), narrow=False) == 2e-3
    assert limit_on_gpu(case("rms_norm", "float32"), narrow=False) == 1e-5
    assert limit_on_gpu(case("rms_norm", "float32"), narrow=True) == 2.5e-2
    assert precision_of(case("rms_norm", "float32"), narrow=True) == "bfloat16"
    assert not is_wide(case("rms_norm", "float16"))
