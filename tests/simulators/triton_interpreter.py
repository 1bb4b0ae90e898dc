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


def use_ordered_dots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add up tl.dot in the order of its inner axis, as a tensor core does for every row alike.

    numpy's matmul is a BLAS call: the order in which it adds up a row may depend on the row's place in the matrix.
    """
    from triton.runtime import interpreter

    inner: Any = interpreter

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        left, right = a.data.astype(d.data.dtype), b.data.astype(d.data.dtype)
        total = d.data.copy()
        for k in range(left.shape[1]):
            total += left[:, k, None] * right[None, k]
        return inner.TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(inner.InterpreterBuilder, "create_dot", create_dot)
