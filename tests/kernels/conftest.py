"""Kernels run in Triton's interpreter; random problems of kernels are drawn by `kernel_case`, a seed."""

import pytest

from tests.simulators.triton_interpreter import use_interpreter

use_interpreter()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give each test of `kernel_case` as many seeds as --kernel-cases says."""
    if "kernel_case" in metafunc.fixturenames:
        metafunc.parametrize("kernel_case", range(metafunc.config.getoption("--kernel-cases")))
