"""Triton's interpreter: turned on before any kernel is imported, or the reason why a folder of tests is skipped."""

import os

import pytest


def use_interpreter() -> None:
    """For a folder's conftest. Skips the folder without torch and Triton."""
    os.environ["TRITON_INTERPRET"] = "1"
    pytest.importorskip("torch", reason="the interpreter works on torch tensors: pip install --group oracle")
    pytest.importorskip("triton", reason="kernels are written in Triton: pip install --group oracle")
