"""A model on a device without its weights: the program as the runtime loads it, with random weights.

One pattern of random numbers per kind of tensor is made on the host and copied repeatedly within the device: codes are
any bytes, matrices have a trained model's spread, norms are around 1, scales are such that nothing overflows.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from benchmarks.gpu.figures import Peaks, Spread
from benchmarks.gpu.programs.packing import WEIGHTS_TABLE
from ingot.artifact import Artifact
from ingot.artifact.programs.launch_checks import read_launches
from ingot.errors import EngineError, UsageError
from ingot.runtime.cuda.driver.device import Device, Queue, Stream
from ingot.runtime.cuda.driver.stopwatch import EventStopwatch, Stopwatch, laps
from ingot.runtime.cuda.executor import CudaExecutor
from ingot.runtime.cuda.loading import LoadedProgram
from ingot.runtime.cuda.programs import BoundProgram, Part
from ingot.runtime.cuda.step_inputs import token_slots
from ingot.runtime.cuda.weights import reserve_weights
from ingot.runtime.forward_batch import ForwardBatch, SamplingArrays
from ingot.runtime.options import EngineOptions
from ingot.sizes import ceil_div

if TYPE_CHECKING:
    import torch

_PATTERN_BYTES = 16 << 20
_TYPES: Mapping[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_SECONDS_A_FIGURE = 0.2


class Machine(Protocol):
    """The machine that the benchmark runs on: a GPU, or, in a dry run, a device that interprets kernels."""

    @property
    def is_dry(self) -> bool:
        """Whether times are meaningless."""
        ...

    @property
    def torch_device(self) -> str:
        """Torch's name of the device."""
        ...

    def open(self) -> Device:
        """The device, opened anew."""
        ...

    def stopwatch(self, device: Device) -> Stopwatch:
        """The device's clock."""
        ...

    def is_alive(self) -> bool:
        """Whether this process can still use the device."""
        ...

    def alias(self, device: Device, address: int, size: int) -> "torch.Tensor":
        """Bytes of the device's memory as a tensor over them."""
        ...

    def synchronize(self) -> None:
        """Wait for torch's own work."""
        ...

    def release(self) -> None:
        """Give back the memory that torch keeps for later tensors."""
        ...


class Gpu:
    """The first GPU that CUDA lists. Implements `Machine`."""

    is_dry = False
    torch_device = "cuda"

    def open(self) -> Device:
        """Through the driver."""
        from ingot.runtime.cuda.driver.driver import open_device

        return open_device()

    def stopwatch(self, device: Device) -> Stopwatch:
        """CUDA events."""
        return EventStopwatch()

    def is_alive(self) -> bool:
        """Whether the context, which all of the process shares, is free of errors."""
        try:
            device = self.open()
            device.activate()
            device.synchronize("a check of the context")
        except EngineError:
            return False
        return True

    def alias(self, device: Device, address: int, size: int) -> "torch.Tensor":
        """Through the interface by which CUDA libraries share arrays."""
        import torch

        return torch.as_tensor(_Shared(address, size), device=self.torch_device)

    def synchronize(self) -> None:
        """Wait for torch's stream."""
        import torch

        torch.cuda.synchronize()

    def release(self) -> None:
        """Empty torch's cache."""
        import torch

        torch.cuda.empty_cache()


class _Shared:
    """Device memory as numba's CUDA Array Interface describes it."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3}


@dataclass(frozen=True)
class Bench:
    """Input of every part of the benchmark.

    deadline  of the part, by time.monotonic()
    peaks     not numbers until the part "hardware" has measured them
    failed    parts and names of the failed tasks that this part takes
    """

    machine: Machine
    programs: Path
    scratch: Path
    output: Path
    deadline: float
    peaks: Peaks
    failed: Sequence[tuple[str, str]] = ()

    def room(self, seconds: float) -> bool:
        """Whether this much time is left."""
        return self.machine.is_dry or time.monotonic() + seconds < self.deadline

    def timed(self, stopwatch: Stopwatch, stream: Stream, work: Queue) -> Spread:
        """Seconds of the work: a few runs to estimate its time, then as many as fit into less than a second."""
        if self.machine.is_dry:
            return Spread.of(laps(stopwatch, stream, work, 1, warm_up=0))
        first = laps(stopwatch, stream, work, 3)
        count = min(40, max(7, int(_SECONDS_A_FIGURE / max(first))))
        return Spread.of(laps(stopwatch, stream, work, count, warm_up=0))


class SyntheticExecutor(CudaExecutor):
    """The CUDA executor of an unpacked program, its weights filled."""

    def __init__(self, artifact: Artifact, device: Device, options: EngineOptions) -> None:
        super().__init__(artifact, device, options, load_weights=reserve_weights)
        self.weights: dict[str, dict[str, Any]] = json.loads(artifact.file(WEIGHTS_TABLE).read_bytes())
        program = read_launches(artifact)
        self.kernels, self.batch_invariant = program.kernels, program.batch_invariant
        fill_weights(self.loaded, self.weights)

    @property
    def loaded(self) -> LoadedProgram:
        """The program as loaded on the device."""
        return self._loaded

    def program(self, name: str) -> BoundProgram:
        """The program of a bucket such as decode-8."""
        return next(bound for bound in self.loaded.programs if bound.program.name == name)

    def send(self, bound: BoundProgram, batch: ForwardBatch, draws: SamplingArrays | None = None) -> None:
        """Copy a batch's inputs to the device, and sampling parameters."""
        slots = token_slots(batch, self.kv_geometry.block_tokens)
        self.loaded.inputs.send(bound.layout, batch, slots, None, draws)

    def step(self, bound: BoundProgram, part: Part) -> Queue:
        """Make a callable that runs a slice of the program on the inputs sent last."""
        return lambda stream: bound.run(part, stream)


def weight_bytes(entry: Mapping[str, Any]) -> int:
    """Size in bytes of a tensor of the table of weights."""
    sizes = {"F32": 4, "F16": 2, "BF16": 2, "I64": 8}
    return int(np.prod(entry["shape"], dtype=np.int64)) * sizes.get(entry["dtype"], 1)


def fill_weights(loaded: LoadedProgram, table: Mapping[str, Mapping[str, Any]]) -> None:
    """Fill all weights with random numbers. Raises UsageError for an unknown kind of tensor."""
    device, stream = loaded.device, loaded.stream
    largest = max(map(weight_bytes, table.values()))
    size = min(_PATTERN_BYTES, -(-largest // 256) * 256)
    patterns: dict[str, int] = {}
    for name, entry in table.items():
        kind = _kind(name, entry)
        if kind not in patterns:
            patterns[kind] = _upload(device, stream, _pattern(kind, size))
        target, left = loaded.weights.addresses[name], weight_bytes(entry)
        for begin in range(0, left, size):
            device.copy(target + begin, patterns[kind], min(size, left - begin), stream)
    device.synchronize("filling weights")
    for address in patterns.values():
        device.free(address)


def _upload(device: Device, stream: Stream, pattern: NDArray[np.uint8]) -> int:
    address = device.allocate(pattern.size, "random numbers")
    pinned = device.allocate_pinned(pattern.size, "random numbers")
    pinned[:] = pattern
    device.copy_in(address, pinned, stream)
    device.synchronize("copying random numbers")
    return address


def _kind(name: str, entry: Mapping[str, Any]) -> str:
    """The kind of a tensor: its type, and the spread of its values."""
    dtype = entry["dtype"]
    if dtype in ("U8", "I8", "F8_E4M3"):
        return "zero points" if "zero_point" in name else "codes"
    if dtype not in _TYPES:
        raise UsageError(f"the weight {name!r} is {dtype}, which the benchmark has no random numbers for")
    if "scale" in name:
        return f"{dtype} scales"
    if ".A.rate" in name:
        return f"{dtype} decays"
    return f"{dtype} {'vectors' if len(entry['shape']) == 1 else 'tables' if dtype == 'F32' else 'matrices'}"


def _pattern(kind: str, size: int) -> NDArray[np.uint8]:
    random = np.random.default_rng(0)
    if kind == "codes":
        # no byte is a NaN of e4m3fn, whose NaN has all bits set but the sign
        signs: NDArray[np.uint8] = random.integers(0, 2, size, np.uint8) << np.uint8(7)
        return random.integers(0, 127, size, np.uint8) | signs
    if kind == "zero points":
        return random.integers(7, 10, size, np.uint8)
    dtype, form = kind.split()
    count = size // np.dtype(_TYPES[dtype]).itemsize
    normal = random.standard_normal(count, np.float32)
    values = {
        "scales": 1e-3 * (1 + 0.1 * np.clip(normal, -3, 3)),
        "decays": -np.exp(0.3 * normal - 1),  # so that states of recurrent layers forget
        "vectors": 1 + 0.1 * normal,
        "tables": np.sin(normal),
        "matrices": 0.02 * normal,
    }[form]
    raw: NDArray[np.uint8] = values.astype(_TYPES[dtype]).view(np.uint8)
    return raw


def decode_batch(rows: int, length: int, block_tokens: int, seed: int = 0) -> ForwardBatch:
    """A decode batch: one token of each of this many sequences, the last of `length`, in shuffled blocks."""
    return ragged_batch([1] * rows, [length] * rows, block_tokens, seed)


def prefill_batch(tokens: int, block_tokens: int, seed: int = 0) -> ForwardBatch:
    """A whole prompt of one sequence."""
    return ragged_batch([tokens], [tokens], block_tokens, seed)


def ragged_batch(counts: Sequence[int], lengths: Sequence[int], block_tokens: int, seed: int = 0) -> ForwardBatch:
    """The last `counts` tokens of sequences of `lengths` tokens, in shuffled blocks; each wants one row of logits."""
    random, sequences = np.random.default_rng(seed), len(counts)
    needed = [ceil_div(length, block_tokens) for length in lengths]
    blocks = random.permutation(sum(needed)).astype(np.int32)
    tables = np.full((sequences, max(needed)), -1, np.int32)
    for table, own in zip(tables, np.split(blocks, np.cumsum(needed)[:-1]), strict=True):
        table[: len(own)] = own
    starts = np.concatenate([[0], np.cumsum(counts)])
    return ForwardBatch(
        input_ids=random.integers(0, 100, int(starts[-1])),
        position_ids=np.concatenate(
            [np.arange(length - count, length) for count, length in zip(counts, lengths, strict=True)]
        ),
        logits_indices=starts[1:] - 1,
        query_starts=starts.astype(np.int32),
        context_lens=np.array(lengths, np.int32),
        block_tables=tables,
        state_slots=np.arange(sequences, dtype=np.int32),
    )
