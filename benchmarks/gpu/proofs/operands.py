"""Operands of a bound launch as torch tensors over the device's own memory, and outputs to compare."""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

import torch
from tests.kernels.torch_types import TORCH_TYPES

from benchmarks.gpu.proofs.recording import Bound
from ingot.artifact.programs.launch_program import Constant
from ingot.pipeline.targets.cuda.kernel_signatures import SIGNATURES

Alias = Callable[[int, int], torch.Tensor]  # address and size in bytes -> uint8 tensor over that memory
_BLOCK = 16  # rows and columns whose error is taken together, so that no wrong tile is lost in a large result
_LEAST_SHARE = 1e-3  # of the whole result's magnitude: what a block of smaller numbers is compared with


@dataclass(frozen=True)
class Operands:
    """A launch's arguments by name.

    sequences    of the bucket, padding included
    """

    bound: Bound
    alias: Alias
    sequences: int

    @cached_property
    def _given(self) -> dict[str, tuple[str, int | float]]:
        return dict(zip(SIGNATURES[self.bound.kernel.name].arguments, self.bound.arguments, strict=True))

    @property
    def names(self) -> Set[str]:
        """Names of the arguments that are given: not null."""
        return {name for name, (_, value) in self._given.items() if value}

    @property
    def constants(self) -> Mapping[str, Constant]:
        """The kernel's compile-time parameters."""
        return self.bound.kernel.constants

    def size(self, name: str) -> int:
        """A compile-time parameter that is a whole number or a flag."""
        return int(self.constants[name])

    def number(self, name: str) -> float:
        """A number that is passed."""
        return self._given[name][1]

    def whole(self, name: str) -> int:
        """A whole number that is passed."""
        return int(self._given[name][1])

    def view(
        self, name: str, shape: Sequence[int], strides: Sequence[int] | None = None, offset: int = 0
    ) -> torch.Tensor:
        """Memory from a pointer on, as a tensor over it; strides and offset in elements, contiguous by default."""
        kind, address = self._given[name]
        dtype = TORCH_TYPES[kind.removeprefix("*")]
        if strides is None:
            strides = torch.empty(tuple(shape), device="meta").stride()
        count = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        raw = self.alias(int(address) + offset * dtype.itemsize, count * dtype.itemsize)
        return raw.view(dtype).as_strided(tuple(shape), tuple(strides))

    def rows(self, name: str, count: int, columns: int, stride: str, offset: int = 0) -> torch.Tensor:
        """[count, columns], rows apart by the argument `stride`."""
        return self.view(name, (count, columns), (self.whole(stride), 1), offset)

    def parts(
        self, name: str, count: int, columns: int, stride: str, part_stride: str, offset: int = 0
    ) -> torch.Tensor:
        """The sum of a result's split-K partials, [count, columns] float32; with a stride of 0 it holds the sum."""
        apart = self.whole(part_stride)
        shape = (self.size("PARTS") if apart else 1, count, columns)
        return self.view(name, shape, (apart, self.whole(stride), 1), offset).float().sum(0)


@dataclass(frozen=True)
class Output:
    """An output of a launch: `found` reads it afterwards, `expected` was computed before, both [rows, columns].

    memory    what to fill with garbage before the launch; None where the launch also reads it
    limit     the largest error; None: that of the activations
    """

    name: str
    found: Callable[[], torch.Tensor]
    expected: torch.Tensor
    memory: torch.Tensor | None = None
    limit: float | None = None


def block_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest ||found - expected|| / ||expected|| of any 16 x 16 block; infinite where a number is not finite.

    0 for empty outputs, as of a random problem in which no token chooses an expert.
    """
    if found.shape != expected.shape:
        raise ValueError(f"found {list(found.shape)}, expected {list(expected.shape)}")
    if not found.numel():
        return 0.0
    found, expected = (one.reshape(-1, one.shape[-1]).double() for one in (found, expected))
    if not bool(torch.isfinite(found).all()):
        return float("inf")
    errors, sizes = _norms(found - expected), _norms(expected)
    whole = float(expected.square().mean().sqrt()) or 1.0
    return float((errors / (sizes + _LEAST_SHARE * whole)).max())


def _norms(x: torch.Tensor) -> torch.Tensor:
    """Root of the mean square of each block."""
    rows, columns = (-x.shape[0] % _BLOCK, -x.shape[1] % _BLOCK)
    sums = torch.nn.functional.pad(x.square(), (0, columns, 0, rows))
    counts = torch.nn.functional.pad(torch.ones_like(x), (0, columns, 0, rows))

    def added(y: torch.Tensor) -> torch.Tensor:
        return y.view(y.shape[0] // _BLOCK, _BLOCK, -1, _BLOCK).sum((1, 3))

    return (added(sums) / added(counts)).sqrt()
