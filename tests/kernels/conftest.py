"""Kernels run in Triton's interpreter."""

from tests.simulators.triton_interpreter import use_interpreter

use_interpreter()
