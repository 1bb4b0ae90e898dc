"""Kernels run in Triton's interpreter."""

from tests.interpreter import use_interpreter

use_interpreter()

from tests.simulators.triton_interpreter import patch_language_once  # noqa: E402  # behind the variable above

patch_language_once()
