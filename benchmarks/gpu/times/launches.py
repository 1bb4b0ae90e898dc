"""The minimum work of each launch of a program: bytes through the device's memory, and operations.

Launches of one kernel at one place of the model in all layers form a group; a group is timed through all layers'
weights and keys, which no cache holds.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.gpu.device import SyntheticExecutor, weight_bytes
from benchmarks.gpu.figures import Work
from ingot.artifact import KVGeometry
from ingot.artifact.programs.launch_program import (
    ELEMENT_BYTES,
    Argument,
    BufferArgument,
    Kernel,
    Launch,
    LaunchProgram,
    LibraryMatmul,
)
from ingot.pipeline.targets.cuda.kernel_signatures import SIGNATURES
from ingot.runtime.cuda.driver.device import Queue
from ingot.runtime.cuda.programs import BoundProgram
from ingot.runtime.forward_batch import ForwardBatch

_LOOK_UPS = ("gather_rows", "gather_quantized_rows", "rotary_kv_write", "rotate_heads")  # a row of a table per token
_GROUPED = "grouped_matmul"
_BETWEEN = (".sums", ".weights")  # split-K partials of attention, few of which a short context uses
_SCALE_BYTES = 2
_LOGIT_BYTES = _FLOAT_BYTES = 4


def share_of_experts(experts: int, pairs: int) -> float:
    """Share of the experts that one of so many pairs of a token and an expert has at least; all are equally likely."""
    return float(1 - (1 - 1 / experts) ** pairs)


def pairs_in(program: LaunchProgram, held: Argument) -> int:
    """Pairs of a token and an expert that a buffer has one int32 for."""
    assert isinstance(held, BufferArgument)
    return program.places[held.name].bytes // ELEMENT_BYTES["i32"]


def _pairs(program: LaunchProgram, launch: Launch, kernel: Kernel) -> int:
    """Pairs of a step of a grouped matmul."""
    return pairs_in(program, launch.arguments[SIGNATURES[kernel.name].index("pairs")])


@dataclass(frozen=True)
class Group:
    """Launches with the same role in all layers; `stored_bytes` counts their weights, keys, values and states."""

    name: str
    queues: tuple[Queue, ...]
    work: Work
    stored_bytes: float

    @property
    def all(self) -> Queue:
        """Run all launches, one after the other."""

        def run(stream: Any) -> None:
            for queue in self.queues:
                queue(stream)

        return run


@dataclass(frozen=True)
class Accounts:
    """Input of the counts: the kernels, the table of weights, the pool, the step."""

    kernels: Mapping[str, Kernel]
    weights: Mapping[str, Mapping[str, Any]]
    kv: KVGeometry
    vocabulary: int
    batch: ForwardBatch

    def work(self, program: LaunchProgram, launch: Launch | LibraryMatmul) -> Work:
        """Bytes and operations of one launch."""
        made = sum(self._buffer_bytes(program, name) for name in launch.buffers if not name.endswith(_BETWEEN))
        if isinstance(launch, LibraryMatmul):
            flops = 2.0 * launch.rows * launch.n * launch.columns
            return Work(self.stored_bytes(program, launch) + made, flops)
        kernel = self.kernels[launch.kernel]
        named = dict(zip(SIGNATURES[kernel.name].arguments, launch.arguments, strict=True))
        return Work(self.stored_bytes(program, launch) + made, self._flops(program, launch, kernel, named))

    def stored_bytes(self, program: LaunchProgram, launch: Launch | LibraryMatmul) -> float:
        """Bytes of weights, of the KV pool and of side states."""
        if isinstance(launch, LibraryMatmul):
            return float(weight_bytes(self.weights[launch.weight.name])) if launch.weight.kind == "weight" else 0.0
        kernel = self.kernels[launch.kernel]
        rows = program.rows if "logits" not in launch.buffers else program.logits_rows
        total = self.pool_bytes(kernel) if "kv_pool" in launch.buffers else self.state_bytes(kernel)
        for argument in launch.arguments:
            if argument.kind == "weight":
                entry = self.weights[argument.name]
                share = 1.0
                if kernel.name in _LOOK_UPS:
                    share = min(rows / entry["shape"][0], 1)
                elif kernel.name.startswith(_GROUPED):
                    share = share_of_experts(entry["shape"][0], _pairs(program, launch, kernel))
                total += weight_bytes(entry) * share
        return total

    def _buffer_bytes(self, program: LaunchProgram, name: str) -> float:
        if name in program.places:
            return program.places[name].bytes
        return program.logits_rows * self.vocabulary * _LOGIT_BYTES if name == "logits" else 0

    def pool_bytes(self, kernel: Kernel) -> float:
        """Bytes of the keys and values that attention reads, or that a step's tokens write; all layers have one shape.

        Latents are keys that contain the values.
        """
        layer = self.kv.layers[0]
        vectors = layer.key_bytes + layer.value_bytes + (layer.scales_of_key + layer.scales_of_value) * _SCALE_BYTES
        tokens = self.batch.context_lens.sum() if "attention" in kernel.name else self.batch.num_tokens
        return float(tokens) * layer.num_kv_heads * vectors

    def state_bytes(self, kernel: Kernel) -> float:
        """Bytes of side states that a step's sequences read and replace."""
        sizes = kernel.constants
        if kernel.name == "short_convolution":
            elements = (float(sizes["TAPS"]) - 1) * float(sizes["CHANNELS"])
        elif "VALUES" in sizes and not sizes.get("MOST"):  # with MOST, chunked_recurrence has the longer sequences
            elements = float(sizes["HEADS"]) * float(sizes["KEYS"]) * float(sizes["VALUES"])
        else:
            return 0.0
        return 2 * len(self.batch.context_lens) * elements * _FLOAT_BYTES

    def _flops(self, program: LaunchProgram, launch: Launch, kernel: Kernel, named: Mapping[str, Argument]) -> float:
        constants = kernel.constants
        if kernel.name.startswith(_GROUPED):
            return 2.0 * _pairs(program, launch, kernel) * float(constants["N"]) * float(constants["COLUMNS"])
        if kernel.name.startswith("matmul"):
            rows = named["rows"]
            assert rows.kind == "number"
            return 2.0 * rows.value * float(constants["N"]) * float(constants["COLUMNS"])
        if kernel.name in ("decode_attention", "ragged_attention", "prefill_attention", "fixed_split_attention"):
            heads = float(constants["GROUP"]) * self.kv.uniform("a GPU's attention kernel").num_kv_heads
            return 4.0 * heads * float(constants["DIM"]) * self._seen()
        if kernel.name in ("latent_decode_attention", "latent_ragged_attention"):
            dims = float(constants["ROPE"]) + 2 * float(constants["RANK"])
            return 2.0 * float(constants["HEADS"]) * dims * self._seen()
        return 0.0

    def _seen(self) -> float:
        """Number of keys that the step's queries attend to, summed."""
        counts = np.diff(self.batch.query_starts).astype(np.float64)
        return float((counts * self.batch.context_lens - counts * (counts - 1) / 2).sum())


def groups(executor: SyntheticExecutor, bound: BoundProgram, batch: ForwardBatch, part: str = "") -> list[Group]:
    """The program's launches of kernels whose names contain `part`, grouped."""
    accounts = Accounts(executor.kernels, executor.weights, executor.kv_geometry, executor.model.vocab_size, batch)
    collected: dict[str, tuple[list[Queue], list[Work], list[float]]] = {}
    for launch, (_, queue) in zip(bound.program.launches, bound.calls, strict=True):
        assert isinstance(launch, Launch | LibraryMatmul), "other engines and devices are not measured kernel by kernel"
        kernel = launch.library if isinstance(launch, LibraryMatmul) else executor.kernels[launch.kernel].name
        if part in kernel:
            name = f"{kernel} {re.sub(r'[0-9]+', '*', launch.node)}"
            queues, works, stored = collected.setdefault(name, ([], [], []))
            queues.append(queue)
            works.append(accounts.work(bound.program, launch))
            stored.append(accounts.stored_bytes(bound.program, launch))
    return [
        Group(name, tuple(queues), sum(works, Work(0)), sum(stored))
        for name, (queues, works, stored) in collected.items()
    ]


def step_work(found: Sequence[Group]) -> Work:
    """The minimum of a whole step: weights and keys once, all matmuls; data that stays in caches is free."""
    return Work(sum(group.stored_bytes for group in found), sum(group.work.flops for group in found))
