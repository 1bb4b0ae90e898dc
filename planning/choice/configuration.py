"""A way to serve a model: what it is built with, the engine's options, and the devices of one replica."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ingot.planning.hardware import Hardware
from ingot.planning.memory import MemoryPlan, plan_memory
from ingot.planning.plan import PlannedModel
from ingot.planning.simulation.deployment import Deployment
from ingot.planning.simulation.simulated_executor import EngineShape
from ingot.planning.simulation.simulated_tiers import CopyLink
from ingot.planning.step_model import StepModel
from ingot.runtime.options import EngineOptions

_LEAST_BATCH_TOKENS = 128
_FEWER_BATCH_TOKENS = 4


@dataclass(frozen=True)
class RecipeVariant:
    """A model as a recipe would build it.

    recipe       name or file; "" for an artifact, or for a checkpoint as it is stored
    overrides    KEY=VALUE of `ingot build --set`
    """

    recipe: str
    overrides: tuple[str, ...]
    subject: PlannedModel

    @property
    def weight_bits(self) -> float:
        """Mean stored bits of a weight of the matmuls."""
        matmuls = self.subject.shape.matmuls
        return 8 * sum(one.bytes for one in matmuls) / sum(one.elements for one in matmuls)

    @property
    def kv_bits(self) -> float:
        """Stored bits of a value of the KV cache, as its type says: a key that is stored wider counts as wide."""
        shape = self.subject.shape
        return (
            8
            * shape.kv_token_bytes
            / sum(layer.num_kv_heads * (layer.key_dim + layer.value_dim) for layer in shape.kv.layers)
        )


@dataclass(frozen=True)
class PricedHardware:
    """A row of hardware by its name, and dollars for a device and hour."""

    name: str
    hardware: Hardware
    price: float
    price_source: str


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One replica: a variant on `tensor` devices of a kind, with options of the engine.

    acceptance    probability that a drafted token is right; with 0 drafted tokens nothing is drafted
    """

    variant: RecipeVariant
    on: PricedHardware
    tensor: int
    max_batch_tokens: int
    prefix_cache: bool = True
    drafted: int = 0
    acceptance: float = 0.0

    @property
    def price(self) -> float:
        """Dollars an hour of one replica."""
        return self.on.price * self.tensor

    @property
    def kind(self) -> tuple[object, ...]:
        """Recipe, hardware and devices: two of a kind differ in options of the engine alone."""
        return self.variant.recipe, self.on.name, self.tensor

    @property
    def losslessness(self) -> tuple[float, float]:
        """Bits of weights and of KV: of two that cost the same, the one with more bits is taken."""
        return self.variant.weight_bits, self.variant.kv_bits

    @property
    def settings(self) -> tuple[str, ...]:
        """KEY=VALUE of `ingot serve --set` where they differ from the engine's own choice."""
        program = self.variant.subject.program
        found = {"max_batch_tokens": self.max_batch_tokens} if self.max_batch_tokens < program.max_batch_tokens else {}
        drafts = {"num_draft_tokens": self.drafted} if self.drafted else {}
        cache = {} if self.prefix_cache else {"prefix_cache": "false"}
        return tuple(f"{name}={value}" for name, value in {**found, **cache, **drafts}.items())

    @cached_property
    def memory(self) -> MemoryPlan:
        """The memory of the devices together, a head of KV on as many as there are more of them than heads."""
        subject, hardware = self.variant.subject, self.on.hardware
        total = int(hardware.memory) * self.tensor
        found = plan_memory(subject.program, subject.model, subject.shape, total, hardware.words)
        if self.tensor == 1:
            return found
        kv_heads = max(layer.num_kv_heads for layer in subject.shape.kv.layers)
        contexts = (self.tensor - 1) * found.context
        blocks = int(max(0, found.num_blocks - contexts // found.block_bytes) / max(1.0, self.tensor / kv_heads))
        return replace(found, num_blocks=blocks)

    @cached_property
    def engine(self) -> EngineShape:
        """The engine that would be loaded. Side state is not simulated, its memory is counted."""
        subject = self.variant.subject
        kv, program = subject.shape.kv, subject.program
        return EngineShape(
            kv=kv.model_copy(update={"state_bytes": 0, "state": ()}) if kv.state_bytes else kv,
            num_blocks=self.memory.num_blocks,
            max_batch_tokens=self.max_batch_tokens,
            max_sequences=min(program.max_sequences, self.max_batch_tokens),
            context_tokens=subject.shape.context_tokens,
            host_link=CopyLink(self.on.hardware.host_link),
            acceptance=(self.acceptance,) * self.drafted,
        )

    @cached_property
    def times(self) -> StepModel:
        """Predicted seconds of its steps."""
        return self.variant.subject.steps(self.on.hardware, self.tensor)

    def deployment(self, replicas: int, *, at_worst: bool, seed: int = 0) -> Deployment:
        """So many replicas; at worst, each step takes as long as the upper end of its interval."""
        options = EngineOptions(prefix_cache=self.prefix_cache)
        found = Deployment(shape=self.engine, times=self.times, options=options, replicas=replicas, seed=seed)
        return found.slower(1 + self.times.relative_error) if at_worst else found

    def __str__(self) -> str:
        """It in words, without the number of replicas."""
        variant = self.variant
        parts = [
            f"{variant.recipe or 'as it is stored'} on {f'{self.tensor} x ' if self.tensor > 1 else ''}{self.on.name}",
            f"KV in {variant.subject.shape.kv.type_in_words}",
            f"max_batch_tokens {self.max_batch_tokens:,}",
        ]
        if self.drafted:
            parts.append(f"{self.drafted} drafts of which each is right with {self.acceptance:.0%}")
        if not self.prefix_cache:
            parts.append("no prefix cache")
        return ", ".join(parts)

    def as_json(self) -> dict[str, Any]:
        """All fields, and the price."""
        variant = self.variant
        return {
            "recipe": variant.recipe,
            "overrides": list(variant.overrides),
            "hardware": self.on.name,
            "tensor_parallel": self.tensor,
            "max_batch_tokens": self.max_batch_tokens,
            "kv": variant.subject.shape.kv.type_in_words,
            "prefix_cache": self.prefix_cache,
            "drafted_tokens": self.drafted,
            "acceptance": self.acceptance,
            "price_per_replica_hour": self.price,
            "price_source": self.on.price_source,
            "weight_bits": variant.weight_bits,
        }


def configurations(
    variants: Sequence[RecipeVariant],
    hardware: Sequence[PricedHardware],
    *,
    most_devices: int | None = None,
    drafted: int = 0,
    acceptance: float = 0.0,
    shares_prefixes: bool = False,
) -> Iterator[Configuration]:
    """Yield every configuration of these parts.

    most_devices     of a replica; None: those of a node
    drafted          also try with so many drafted tokens; 0 does not
    shares_prefixes  whether the load repeats beginnings of prompts, so that the prefix cache makes a difference
    """
    for variant, on in itertools.product(variants, hardware):
        if variant.subject.program.on_cpu != (on.hardware.kind == "cpu"):
            continue
        most = min(most_devices or on.hardware.devices, on.hardware.devices)
        drafts = (0, drafted) if drafted else (0,)
        caches = (True, False) if shares_prefixes else (True,)
        sizes = _batch_tokens(variant.subject.program.max_batch_tokens)
        for tensor, size, drafts_a_step, cache in itertools.product(_powers(most), sizes, drafts, caches):
            yield Configuration(
                variant=variant,
                on=on,
                tensor=tensor,
                max_batch_tokens=size,
                prefix_cache=cache,
                drafted=drafts_a_step,
                acceptance=acceptance if drafts_a_step else 0.0,
            )


def _powers(most: int) -> Iterable[int]:
    return (1 << power for power in range(most.bit_length()))


def _batch_tokens(most: int) -> Iterable[int]:
    """The most tokens of a step that a program computes, and fewer, with which decoding waits less for prompts."""
    fewer = most // _FEWER_BATCH_TOKENS
    return (most, fewer) if fewer >= _LEAST_BATCH_TOKENS else (most,)
