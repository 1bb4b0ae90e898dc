"""What limits each operation of a step on a machine: its bytes, its operations, and the batch at which that changes."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from ingot.artifact.programs.expert_choices import reached
from ingot.planning.hardware import Hardware
from ingot.planning.load import Load
from ingot.planning.model_shape import Matmuls, ModelShape

_VALUE_BYTES = 2
Regime = Literal["memory", "compute"]


@dataclass(frozen=True)
class Operation:
    """Operations of one kind in a decode step.

    intensity     operations for each byte moved; from `threshold` on, arithmetic limits
    change_at     sequences from which on arithmetic limits; None where it never does
    seconds       at the data sheet's bandwidth and flops
    """

    name: str
    bytes: float
    flops: float
    intensity: float
    threshold: float
    change_at: int | None
    seconds: float

    @property
    def regime(self) -> Regime:
        """The resource that limits it."""
        return "memory" if self.intensity < self.threshold else "compute"

    def as_json(self) -> dict[str, Any]:
        """All figures."""
        return {**asdict(self), "regime": self.regime}


def decode_operations(shape: ModelShape, hardware: Hardware, load: Load, rows: float) -> list[Operation]:
    """The matmuls and the attention of a step that decodes so many sequences."""
    found = [_matmul(shape, one, hardware, rows) for one in shape.matmuls]
    return [*found, _attention(shape, hardware, load, rows)] if shape.kv.layers else found


def _matmul(shape: ModelShape, matmul: Matmuls, hardware: Hardware, rows: float) -> Operation:
    per_row = (matmul.rows + matmul.columns) * matmul.count * matmul.share * _VALUE_BYTES
    weights = matmul.bytes * (reached(shape.expert_reach, rows) if matmul.role == "expert" else 1.0)
    flops = matmul.flops_per_token * rows
    moved = weights + per_row * rows
    peak = hardware.peak(matmul.inputs)[1]
    # rows f / (w + rows v) = peak / bandwidth, with all weights read
    left = matmul.flops_per_token - per_row * peak / hardware.bandwidth
    change = int(-(-matmul.bytes * peak / hardware.bandwidth // left)) if left > 0 else None
    return _operation(matmul.label, moved, flops, peak, hardware, change)


def _attention(shape: ModelShape, hardware: Hardware, load: Load, rows: float) -> Operation:
    """Each sequence reads KV of its own: a larger batch changes nothing."""
    context = shape.read_tokens(load.mean_context)
    moved = rows * (context * shape.kv_token_bytes + shape.kv.state_bytes * 2)
    return _operation(
        "attention", moved, rows * context * shape.attention_flops, hardware.peak("fp16")[1], hardware, None
    )


def _operation(
    name: str, moved: float, flops: float, peak: float, hardware: Hardware, change_at: int | None
) -> Operation:
    seconds = max(moved / hardware.bandwidth, flops / peak)
    return Operation(name, moved, flops, flops / moved, peak / hardware.bandwidth, change_at, seconds)
