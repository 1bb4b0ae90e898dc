"""Triton's interpreter, which runs kernels on the CPU.

`tests/conftest.py` and `use_interpreter` set TRITON_INTERPRET before any kernel is imported, because Triton reads it
when a kernel is defined. Tests that compile kernels do so in processes without the variable.
"""

import os
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

import numpy as np
import pytest


def use_interpreter() -> None:
    """Interpret all kernels of this process. Call before importing kernels; skips without torch and Triton."""
    os.environ["TRITON_INTERPRET"] = "1"
    pytest.importorskip("torch", reason="the interpreter works on torch tensors: pip install --group oracle")
    pytest.importorskip("triton", reason="kernels are written in Triton: pip install --group oracle")
    patch_language_once()


def patch_language_once() -> None:
    """Speed up the interpreter: patch Triton's language once, not at every call of every function; keep types.

    Afterwards this process cannot compile kernels. Without these internals of Triton the function does nothing.
    Triton 3.6 converts arrays of one element with int(), which numpy 2.4 refuses: tensors get an index of their own.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    inner: Any = interpreter
    if not hasattr(inner, "_LangPatchScope") or getattr(inner, "_is_patched_once", False):
        return
    _let_tensors_be_indices(inner)
    _let_masks_be_numbers(inner.InterpreterBuilder)
    inner._patch_lang(FunctionType(patch_language_once.__code__, {"tl": tl, "core": tl.core}))
    inner._patch_lang = lambda function: inner._LangPatchScope()
    inner._get_np_dtype = _by_name(inner._get_np_dtype)  # makes a table of all types at every call
    _keep_types(tl.core)
    inner._is_patched_once = True


def _let_tensors_be_indices(inner: Any) -> None:
    """Convert tensors of one element to an integer in every version of Triton and numpy."""
    usual = inner._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        usual(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    inner._patch_lang_tensor = patch


def _let_masks_be_numbers(builder: Any) -> None:
    """Turn masks of whole numbers into truth values, which Triton 3.9 needs and its own comparisons do not all make."""
    load, store = builder.create_masked_load, builder.create_masked_store

    def truth(mask: Any) -> Any:
        return mask if mask.data.dtype == np.bool_ else type(mask)(mask.data.astype(np.bool_), mask.dtype)

    def masked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        return load(self, pointers, truth(mask), *rest)

    def masked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        return store(self, pointers, value, truth(mask), *rest)

    builder.create_masked_load, builder.create_masked_store = masked_load, masked_store


def _by_name(convert: Callable[[Any], np.dtype[Any]]) -> Callable[[Any], np.dtype[Any]]:
    """The same conversion of Triton's types, done once for every scalar or pointer type."""
    known: dict[str, np.dtype[Any]] = {}

    def converted(given: Any) -> np.dtype[Any]:
        scalar = given.scalar
        if scalar.name not in known:
            known[scalar.name] = convert(scalar)
        return known[scalar.name]

    return converted


def _keep_types(core: Any) -> None:
    """Fill types of blocks, and tensors of them, with what was computed for the first equal one."""
    fill_type, fill_tensor = core.block_type.__init__, core.tensor.__init__
    types: dict[tuple[Any, ...], dict[str, Any]] = {}
    tensors: dict[str, tuple[Any, ...]] = {}

    def filled_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(getattr(size, "value", size) for size in shape))
        if key not in types:
            fill_type(self, element_ty, shape)
            types[key] = dict(vars(self))
        vars(self).update(types[key])

    def filled_tensor(self: Any, handle: Any, type: Any) -> None:
        if type.name not in tensors:
            fill_tensor(self, handle, type)
            tensors[type.name] = self.shape, self.numel, self.dtype
        self.handle, self.type = handle, type
        self.shape, self.numel, self.dtype = tensors[type.name]

    core.block_type.__init__, core.tensor.__init__ = filled_type, filled_tensor


def use_ordered_dots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add up tl.dot in the order of its inner axis, as a tensor core does for every row alike.

    numpy's matmul is a BLAS call: the order in which it adds up a row may depend on the row's place in the matrix.
    """
    from triton.runtime import interpreter

    inner: Any = interpreter

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        left, right = a.data.astype(d.data.dtype), b.data.astype(d.data.dtype)
        terms = np.empty((left.shape[1] + 1, *d.data.shape), d.data.dtype)  # [inner + 1, rows, columns]
        terms[0] = d.data
        np.multiply(left.T[:, :, None], right[:, None, :], out=terms[1:])
        return inner.TensorHandle(np.add.reduce(terms, axis=0), d.dtype.scalar)  # its outermost axis, one by one

    monkeypatch.setattr(inner.InterpreterBuilder, "create_dot", create_dot)


def refuse_loads_outside(monkeypatch: pytest.MonkeyPatch, tensors: Iterable[Any]) -> list[int]:
    """Let no load leave the memory of these tensors; in the list is how many elements each load reads."""
    from triton.runtime import interpreter

    inner: Any = interpreter
    ends = [(one.data_ptr(), one.data_ptr() + one.untyped_storage().nbytes()) for one in tensors]
    usual = inner.InterpreterBuilder.create_masked_load
    counts = list[int]()

    def checked(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        places = pointers.data[mask.data.astype(np.bool_)]
        size = pointers.get_element_ty().primitive_bitwidth // 8
        if places.size:
            first, last = int(places.min()), int(places.max()) + size
            assert any(begin <= first and last <= end for begin, end in ends), f"a load of {size} bytes leaves memory"
            counts.append(places.size)
        return usual(self, pointers, mask, *rest)

    monkeypatch.setattr(inner.InterpreterBuilder, "create_masked_load", checked)
    return counts


def use_shuffled_programs(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    """Run the programs of every launch in a random order, each to its end: as a GPU may."""
    from triton.runtime import interpreter

    inner: Any = interpreter
    builder = inner.interpreter_builder
    set_dim, set_index = builder.set_grid_dim, builder.set_grid_idx
    order: list[int] = []

    def set_shuffled_dim(*grid: int) -> None:
        order[:] = rng.permutation(int(np.prod(grid))).tolist()
        set_dim(*grid)

    def set_shuffled_index(*index: int) -> None:
        flat = np.ravel_multi_index(index, builder.grid_dim)
        set_index(*map(int, np.unravel_index(order[int(flat)], builder.grid_dim)))

    monkeypatch.setattr(builder, "set_grid_dim", set_shuffled_dim)
    monkeypatch.setattr(builder, "set_grid_idx", set_shuffled_index)
