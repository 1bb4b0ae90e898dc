"""Turns Triton's interpreter on before any kernel is imported; without torch and Triton the folder is skipped."""

import os

import pytest

os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("torch", reason="the interpreter works on torch tensors: pip install --group oracle")
pytest.importorskip("triton", reason="kernels are written in Triton: pip install --group oracle")
