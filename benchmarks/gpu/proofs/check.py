"""Check every kernel on the GPU, launch by launch, in small models of all kinds.

A device runs every launch twice, on the GPU and in the interpreter in float32, and compares the outputs:

    GPU             memory ──kernel──► memory'
    interpreter     memory, 16-bit floats widened ──same kernel──► expected memory'

Tests prove the interpreted kernels against numpy; this proves that the compiled kernels equal the interpreted ones. All
memory is filled with NaN first, so that unwritten elements show. Use it with INGOT_CUDA_BLOCKING=1. Sampled tokens may
differ where two logits are nearly equal.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray
from tests.kernels.torch_types import TORCH_TYPES
from tests.simulators.triton_interpreter import patch_language_once

from benchmarks.gpu.device import Bench, Machine
from benchmarks.gpu.parts import Record, Task
from benchmarks.gpu.programs.packing import unpack_artifact
from ingot.artifact import Artifact
from ingot.artifact.programs.launch_checks import read_launches
from ingot.artifact.programs.launch_program import CubinFacts, Kernel
from ingot.pipeline.targets.cuda.kernel_signatures import SIGNATURES
from ingot.runtime.cuda.driver.device import Bytes, Device, Given, LoadedKernel, Queue, Stream
from ingot.runtime.cuda.executor import CudaExecutor
from ingot.runtime.forward_batch import ForwardBatch, SamplingArrays
from ingot.runtime.options import EngineOptions

_WIDENED = ("fp16", "bf16")
_POISON = 0xFF  # a NaN in every float
# Relative to the whole output (Frobenius norm), by compute type: its rounding, and that of an inner sum.
LIMITS = {"fp32": 2e-3, "fp16": 4e-3, "bf16": 2e-2}
# Of 4-bit codes, whose steps are large: those that 16-bit rounding before takes to the next code.
_LIMITS_OF_4_BITS = {"fp32": 2e-3, "fp16": 2e-2, "bf16": 6e-2}
_SECONDS_A_CASE, _MOST_SECONDS = 12.0, 60.0
_BLOCKS = 96
# Tokens of each of some sequences, and their context lengths: prompts, decode steps, more rows than "few".
_STEPS = (((9, 1, 4), (9, 1, 4)), ((1, 1, 1), (10, 2, 5)), ((1,), (11,)), ((20, 22, 24), (31, 24, 29)))
_DRY_STEPS = (((3, 1), (3, 1)),)


@dataclass(frozen=True)
class Comparison:
    """Comparison of one output argument of a launch with its expected values."""

    kernel: str
    node: str
    argument: str
    activations: str
    error: float
    elements: int
    in_4_bits: bool = False

    @property
    def limit(self) -> float:
        """The largest error that rounding explains."""
        return (_LIMITS_OF_4_BITS if self.in_4_bits else LIMITS)[self.activations]


@dataclass(frozen=True)
class _Kernel:
    loaded: LoadedKernel
    kernel: Kernel


class LockstepDevice:
    """Wraps a device; appends to `comparisons` at every launch."""

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
        """Load on the GPU; the interpreter needs no loading."""
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
        """Copies of all allocations that the arguments point into, by their start addresses."""
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
        """A copy of the memory from an argument's pointer to the end of its allocation."""
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
        names = list(SIGNATURES[kernel.name].arguments)
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
            count, in_4_bits = int(written.sum()), _is_in_4_bits(found, kernel)
            one = Comparison(kernel.name, node, name, self._activations, error, count, in_4_bits)
            self.comparisons.append(one)


def relative_error(found: NDArray[np.float64], wanted: NDArray[np.float64]) -> float:
    """||found - expected|| / ||expected||; infinite where only one of them is finite."""
    if (np.isfinite(found) != np.isfinite(wanted)).any():
        return float("inf")
    known = np.isfinite(wanted)
    scale = float(np.linalg.norm(wanted[known])) or 1.0
    return float(np.linalg.norm(found[known] - wanted[known])) / scale


def _interpret(kernel: Kernel, grid: tuple[int, int, int], given: Sequence[Any]) -> None:
    """Compute everything in float32, matmuls included."""
    module, _, name = SIGNATURES[kernel.name].function.partition(".")
    function = getattr(import_module(f"ingot.kernels.{module}"), name)
    constants = {key: _constant(key, value) for key, value in kernel.constants.items()}
    function[grid](*given, **constants)


def _constant(name: str, value: Any) -> Any:
    if name in ("UPCAST", "EXACT"):
        return True
    return tl.float32 if isinstance(value, str) else value


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Whether two arrays are equal bit for bit, so that equal NaNs count as equal."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize])


def _is_in_4_bits(tensor: torch.Tensor, kernel: Kernel) -> bool:
    return tensor.dtype == torch.uint8 and kernel.name == "rotary_kv_write"


def _numbers(tensor: torch.Tensor, kernel: Kernel) -> NDArray[np.float64]:
    """The array in float64; two 4-bit codes that share a byte become two rows."""
    if _is_in_4_bits(tensor, kernel):
        codes = tensor.to(torch.int64)
        halves = torch.stack([((codes & 15) ^ 8) - 8, ((codes >> 4) ^ 8) - 8], dim=-1)
        return halves.to(torch.float64).numpy()
    array: NDArray[np.float64] = tensor.to(torch.float64).numpy()
    return array


def check(bench: Bench) -> list[Task]:
    """Every packed case."""
    patch_language_once()
    files = sorted(bench.programs.glob("check-*.zip"))
    return [Task(file.stem, partial(_checked, bench, file), _MOST_SECONDS, _SECONDS_A_CASE) for file in files]


def _checked(bench: Bench, file: Path) -> list[Record]:
    """The worst error of each kernel and argument."""
    found = compare(unpack_artifact(file, bench.scratch / file.stem), bench.machine)
    return [{"figure": "check", "case": file.stem, **record} for record in worst(found)]


def compare(artifact: Artifact, machine: Machine) -> list[Comparison]:
    """Run prompts, decode steps, many rows and both ways to choose tokens, each launch twice."""
    program = read_launches(artifact)
    device = LockstepDevice(machine.open(), program.activation_type)
    executor = CudaExecutor(artifact, cast(Device, device), EngineOptions(kv_blocks=_BLOCKS))
    try:
        vocabulary, block = executor.model.vocab_size, executor.kv_geometry.block_tokens
        tables = np.random.default_rng(1).permutation(_BLOCKS)
        rows = max(one.rows for one in program.programs if one.attention == "decode")
        steps = _DRY_STEPS if machine.is_dry else _STEPS
        few = tables[: 3 * (32 // block + 1)].reshape(3, -1).astype(np.int32)
        for counts, ends in steps:
            executor.forward(batch_of(list(counts), list(ends), few, vocabulary))
        wide = batch_of([1] * rows, [1] * rows, tables[:rows, None].astype(np.int32), vocabulary)
        executor.submit(wide, _draws(rows, 0.0), np.full(rows, -1, np.int32)).tokens()
        one = batch_of([1], [1], tables[:1, None].astype(np.int32), vocabulary)
        executor.submit(one, _draws(1, 0.8), np.zeros(1, np.int32)).tokens()
    finally:
        executor.close()
    return device.comparisons


def worst(comparisons: list[Comparison]) -> list[Record]:
    """The largest error of each kernel and argument, with its limit."""
    by_argument: dict[tuple[str, str], list[Comparison]] = {}
    for one in comparisons:
        by_argument.setdefault((one.kernel, one.argument), []).append(one)
    records: list[Record] = []
    for (kernel, argument), found in sorted(by_argument.items()):
        largest = max(found, key=lambda one: one.error)
        records.append(
            {
                "kernel": kernel,
                "argument": argument,
                "node": largest.node,
                "launches": len(found),
                "elements": sum(one.elements for one in found),
                "error": largest.error,
                "limit": largest.limit,
                "within": largest.error <= largest.limit or argument == "tokens",
            }
        )
    return records


def batch_of(counts: list[int], ends: list[int], tables: np.ndarray, vocabulary: int) -> ForwardBatch:
    """The last `counts` tokens of sequences that reach `ends`, with random ids."""
    starts = np.concatenate([[0], np.cumsum(counts)])
    spans = [np.arange(end - count, end) for count, end in zip(counts, ends, strict=True)]
    return ForwardBatch(
        input_ids=np.random.default_rng(sum(ends)).integers(0, vocabulary, int(starts[-1])),
        position_ids=np.concatenate(spans),
        logits_indices=starts[1:] - 1,
        query_starts=starts.astype(np.int32),
        context_lens=np.array(ends, np.int32),
        block_tables=tables[: len(counts)],
        state_slots=np.arange(len(counts), dtype=np.int32),
    )


def _draws(rows: int, temperature: float) -> SamplingArrays:
    random = np.random.default_rng(2)
    return SamplingArrays(
        temperatures=np.full(rows, temperature, np.float32),
        top_ks=random.integers(0, 9, rows).astype(np.int32),
        top_ps=random.uniform(0.5, 1, rows).astype(np.float32),
        uniforms=random.uniform(0, 1, rows).astype(np.float32),
    )
