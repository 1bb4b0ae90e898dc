"""A device that runs every launch twice, on a card and in the interpreter in float32, and compares what was written.

    card            memory ──kernel──► memory'
    interpreter     memory, 16-bit floats widened ──same kernel──► what memory' should be

Tests prove the interpreted kernels against numpy; what is proved here is that the compiled ones do the same. All memory
is filled with NaN first, so that what nobody wrote shows. Give it to the CUDA executor with INGOT_CUDA_BLOCKING=1.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray
from tests.kernels.torch_types import TORCH_TYPES
from tests.simulators.triton_interpreter import patch_language_once

from ingot.artifact.launch_program import CubinFacts, Kernel
from ingot.pipeline.targets.cuda.kernel_signatures import CATALOG
from ingot.runtime.cuda.device import Bytes, Device, Given, LoadedKernel, Queue, Stream

_WIDENED = ("fp16", "bf16")
_POISON = 0xFF  # a NaN in every float
# Relative to the whole output (Frobenius), by what is computed in: its rounding, and that of an inner product of it.
LIMITS = {"fp32": 2e-3, "fp16": 4e-3, "bf16": 2e-2}


@dataclass(frozen=True)
class Comparison:
    """What a launch wrote to one argument, beside what it should have."""

    kernel: str
    node: str
    argument: str
    activations: str
    error: float
    elements: int

    @property
    def limit(self) -> float:
        """The largest error that rounding explains."""
        return LIMITS[self.activations]


@dataclass(frozen=True)
class _Kernel:
    loaded: LoadedKernel
    kernel: Kernel


class LockstepDevice:
    """Wraps a device; `comparisons` grow with every launch."""

    def __init__(self, device: Device, activations: str) -> None:
        self._device, self._activations = device, activations
        self._sizes: dict[int, int] = {}
        self._stream = device.make_stream()
        self.comparisons: list[Comparison] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def allocate(self, size: int, what: str) -> int:
        """Memory full of NaN."""
        address = self._device.allocate(size, what)
        self._sizes[address] = size
        poison = self._device.allocate_pinned(size, what)
        poison.fill(_POISON)
        self._device.copy_in(address, poison, self._stream)
        self._device.synchronize("filling memory")
        return address

    def load_kernel(self, cubin: Bytes, kernel: Kernel, facts: CubinFacts) -> _Kernel:
        """On the card; the interpreter needs no loading."""
        return _Kernel(self._device.load_kernel(cubin, kernel, facts), kernel)

    def bind(self, kernel: _Kernel, grid: tuple[int, int, int], arguments: Sequence[Given], node: str) -> Queue:
        """A launch that is compared whenever it is queued."""
        queue = self._device.bind(kernel.loaded, grid, arguments, node)

        def run(stream: Stream) -> None:
            self._device.synchronize("what came before")
            before = self._snapshot(arguments)
            queue(stream)
            self._device.synchronize(f"{kernel.kernel.name} of {node}")
            self._compare(kernel.kernel, grid, arguments, node, before, self._snapshot(arguments))

        return run

    def _snapshot(self, arguments: Sequence[Given]) -> dict[int, Bytes]:
        """Everything that lies in the allocations that the arguments point into, by their beginnings."""
        bases = {self._base(int(value)) for kind, value in arguments if kind.startswith("*") and value}
        copies = {}
        for base in bases:
            copies[base] = self._device.allocate_pinned(self._sizes[base], "a copy of memory")
            self._device.copy_out(copies[base], base, self._stream)
        self._device.synchronize("copying memory")
        return copies

    def _base(self, address: int) -> int:
        bases = sorted(self._sizes)
        return bases[bisect_right(bases, address) - 1]

    def _tensor(self, copies: dict[int, Bytes], kind: str, address: int, *, widen: bool) -> torch.Tensor:
        """A copy of what an argument points at, to the end of its allocation."""
        name = kind.removeprefix("*")
        if not address:
            return torch.zeros(1, dtype=torch.float32 if name in _WIDENED else TORCH_TYPES[name])
        base = self._base(address)
        raw, dtype = copies[base][address - base :], TORCH_TYPES[name]
        whole = torch.from_numpy(raw[: len(raw) // dtype.itemsize * dtype.itemsize].copy()).view(dtype)
        return whole.to(torch.float32) if widen and name in _WIDENED else whole

    def _compare(
        self,
        kernel: Kernel,
        grid: tuple[int, int, int],
        arguments: Sequence[Given],
        node: str,
        before: dict[int, Bytes],
        after: dict[int, Bytes],
    ) -> None:
        given = [
            self._tensor(before, kind, int(value), widen=True) if kind.startswith("*") else value
            for kind, value in arguments
        ]
        untouched = [one.clone() if isinstance(one, torch.Tensor) else None for one in given]
        _interpret(kernel, grid, given)
        names = list(CATALOG[kernel.name].arguments)
        for name, (kind, value), wanted, old in zip(names, arguments, given, untouched, strict=True):
            if (
                old is None
                or not isinstance(wanted, torch.Tensor)
                or not value
                or torch.equal(_bits(wanted), _bits(old))
            ):
                continue
            written = _bits(wanted) != _bits(old)
            found = self._tensor(after, kind, int(value), widen=False)
            error = relative_error(_numbers(found, kernel)[written], _numbers(wanted, kernel)[written])
            one = Comparison(kernel.name, node, name, self._activations, error, int(written.sum()))
            self.comparisons.append(one)


def relative_error(found: NDArray[np.float64], wanted: NDArray[np.float64]) -> float:
    """||found - wanted|| / ||wanted||; infinite where one is finite and the other is not."""
    if (np.isfinite(found) != np.isfinite(wanted)).any():
        return float("inf")
    known = np.isfinite(wanted)
    scale = float(np.linalg.norm(wanted[known])) or 1.0
    return float(np.linalg.norm(found[known] - wanted[known])) / scale


def quicken_interpreter() -> None:
    """Make Triton's interpreter fast, and fit for the numpy at hand. This process then compiles no kernels.

    Triton 3.6 takes numbers out of arrays of one element by int(), which numpy 2.4 refuses.
    """
    from triton.runtime import interpreter

    inner: Any = interpreter
    usual = inner._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        usual(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    inner._patch_lang_tensor = patch
    patch_language_once()


def _interpret(kernel: Kernel, grid: tuple[int, int, int], given: Sequence[Any]) -> None:
    """All floats in float32, and products too."""
    module, _, name = CATALOG[kernel.name].function.partition(".")
    function = getattr(import_module(f"ingot.kernels.{module}"), name)
    constants = {key: _constant(key, value) for key, value in kernel.constants.items()}
    function[grid](*given, **constants)


def _constant(name: str, value: Any) -> Any:
    if name == "UPCAST":
        return True
    return tl.float32 if isinstance(value, str) else value


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """NaN differs from itself; its bits do not."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize])


def _numbers(tensor: torch.Tensor, kernel: Kernel) -> NDArray[np.float64]:
    """In float64, a row for two 4-bit codes that share a byte."""
    if tensor.dtype == torch.uint8 and kernel.name == "rotary_kv_write":
        codes = tensor.to(torch.int64)
        halves = torch.stack([((codes & 15) ^ 8) - 8, ((codes >> 4) ^ 8) - 8], dim=-1)
        return halves.to(torch.float64).numpy()
    array: NDArray[np.float64] = tensor.to(torch.float64).numpy()
    return array
