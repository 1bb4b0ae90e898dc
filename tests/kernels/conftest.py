"""Kernels run in Triton's interpreter."""

from tests.interpreter import use_interpreter

use_interpreter()
