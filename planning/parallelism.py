"""How many devices a model needs, and how they share it.

tensor parallel    in a node: each device has a share of each matrix and of the KV heads, and sums activations twice
                   a layer
expert parallel    of a mixture: each device has a share of the experts, and all other weights; it decodes sequences
                   of its own, whose tokens go to their experts' devices and back in each layer
pipeline stages    across nodes: a stage has a share of the layers; M microbatches over S stages idle
                   (S - 1) / (M + S - 1) of the time
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ingot.planning.hardware import Hardware
from ingot.planning.memory import fitting_sequences, sequence_bytes
from ingot.planning.model_shape import ModelShape

MOST_NODES = 64
_ACTIVATION_BYTES = 2


@dataclass(frozen=True)
class Parallelism:
    """Devices of one replica: `tensor` of a node in `pipeline` stages, or `expert` that share the experts alone."""

    tensor: int
    pipeline: int
    sequences: float
    expert: int = 1

    def __post_init__(self) -> None:
        assert min(self.tensor, self.pipeline, self.expert) >= 1
        assert self.expert == 1 or self.tensor == self.pipeline == 1

    @property
    def devices(self) -> int:
        """Devices of a replica."""
        return self.tensor * self.pipeline * self.expert

    def as_json(self) -> dict[str, Any]:
        """All figures."""
        return {
            "tensor_parallel": self.tensor,
            "expert_parallel": self.expert,
            "pipeline_stages": self.pipeline,
            "devices": self.devices,
            "sequences": self.sequences,
        }

    def __str__(self) -> str:
        """It in words."""
        if self.devices == 1:
            return "one device"
        if self.expert > 1:
            return f"{self.devices} devices: experts over {self.expert}, each with all other weights"
        stages = f", {self.pipeline} pipeline stages" if self.pipeline > 1 else ""
        return f"{self.devices} devices: tensor parallel over {self.tensor}{stages}"


def choose_parallelism(
    shape: ModelShape, hardware: Hardware, tokens: int, sequences: float, share: float = 0.9, devices: int | None = None
) -> Parallelism | None:
    """The fewest devices that hold the weights and so many sequences of so many tokens; None where 64 nodes do not.

    share      of each device's memory, for weights and KV
    devices    take exactly these, of one node or of whole nodes
    """
    least = min(1.0, sequences) if devices is not None else sequences
    found = (layout for layout in layouts(shape, hardware, tokens, share) if devices in (None, layout.devices))
    return next((layout for layout in found if layout.sequences >= least), None)


def layouts(shape: ModelShape, hardware: Hardware, tokens: int, share: float = 1.0) -> Iterator[Parallelism]:
    """Yield every way to share the model, the fewest devices first, with the sequences of so many tokens that fit."""
    node = [count for count in (1 << power for power in range(11)) if count <= hardware.devices]
    memory = hardware.memory * share
    for tensor, pipeline in [(count, 1) for count in node] + [(node[-1], nodes) for nodes in range(2, MOST_NODES + 1)]:
        # Stages share the layers, so each has as many bytes of each part less.
        yield Parallelism(tensor, pipeline, fitting_sequences(shape, memory * pipeline, tokens, tensor))
        devices = tensor * pipeline
        if 1 < devices <= shape.experts[0]:
            yield Parallelism(1, 1, _of_spread_experts(shape, memory, tokens, devices), devices)


def _of_spread_experts(shape: ModelShape, memory: float, tokens: int, devices: int) -> float:
    """Sequences that fit: each device has a share of the experts, all other weights, and KV of its own sequences."""
    others = shape.matmul_bytes - shape.expert_bytes + shape.embedding_bytes
    return max(0.0, (memory - others) * devices - shape.expert_bytes) / sequence_bytes(shape, tokens)


def bubble_share(stages: int, microbatches: int) -> float:
    """Share of the time that a pipeline idles: (S - 1) / (M + S - 1)."""
    return (stages - 1) / (microbatches + stages - 1)


def stage_transfer_seconds(shape: ModelShape, hardware: Hardware, rows: float) -> float:
    """Seconds to pass the hidden states of so many tokens to the next stage, over the network."""
    return rows * shape.hidden_size * _ACTIVATION_BYTES / hardware.network


@dataclass(frozen=True)
class Disaggregation:
    """Whether it pays to compute prompts on other devices.

    transfer_seconds      to move a prompt's KV
    interference_seconds  that prompts add to the decoding of one request
    """

    transfer_bytes: int
    transfer_seconds: float
    interference_seconds: float

    @property
    def pays(self) -> bool:
        """Report if moving the KV costs less than prompts cost the decoding of others."""
        return self.transfer_seconds < self.interference_seconds

    def as_json(self) -> dict[str, Any]:
        """All figures."""
        return {
            "transfer_bytes": self.transfer_bytes,
            "transfer_seconds": self.transfer_seconds,
            "interference_seconds": self.interference_seconds,
            "pays": self.pays,
        }


def disaggregation(
    shape: ModelShape, bandwidth: float, prompt_tokens: int, output_tokens: int, interference: float
) -> Disaggregation:
    """Compare the transfer of a prompt's KV with the seconds that others' prompts add to each token of an output."""
    size = shape.kv_bytes(prompt_tokens) + shape.kv.state_bytes
    return Disaggregation(size, size / bandwidth, interference * output_tokens)
