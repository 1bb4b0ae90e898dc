"""Triton's interpreter, which runs kernels on the CPU.

`tests/conftest.py` and `use_interpreter` set TRITON_INTERPRET before any kernel is imported, because Triton reads it
when a kernel is defined. Tests that compile kernels do so in processes without the variable.
"""

import os
from types import FunctionType
from typing import Any

import pytest


def use_interpreter() -> None:
    """Interpret all kernels of this process. Call before importing kernels; skips without torch and Triton."""
    os.environ["TRITON_INTERPRET"] = "1"
    pytest.importorskip("torch", reason="the interpreter works on torch tensors: pip install --group oracle")
    pytest.importorskip("triton", reason="kernels are written in Triton: pip install --group oracle")
    patch_language_once()


def patch_language_once() -> None:
    """Speed up the interpreter: patch Triton's language once, not at every call of every function.

    Afterwards this process cannot compile kernels. Without these internals of Triton the function does nothing.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    inner: Any = interpreter
    if not hasattr(inner, "_LangPatchScope") or getattr(inner, "_is_patched_once", False):
        return
    inner._patch_lang(FunctionType(patch_language_once.__code__, {"tl": tl, "core": tl.core}))
    inner._patch_lang = lambda function: inner._LangPatchScope()
    inner._is_patched_once = True
