"""The sizes of a model that decide what a step costs: its matmuls, its attention and its KV geometry."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from ingot.artifact import KVGeometry
from ingot.artifact.kv_geometry import KVType
from ingot.artifact.programs.expert_choices import Reach, even_reach
from ingot.planning.hardware import FlopType

_GROUP_BITS = 0.5
"""Bits a weight for a 16-bit scale and a zero point of each block of 32 or so."""
MatmulRole = Literal["linear", "expert", "router", "head"]


@dataclass(frozen=True)
class Matmuls:
    """Weight matrices [rows, columns] of one shape and one stored form.

    count            matrices of all layers; of experts, those of all experts
    bytes            stored bytes of all of them: codes, scales and zero points
    experts, chosen  experts of a layer, and those that compute a token; 0 for what computes every token
    inputs           type that the inputs are multiplied in
    """

    role: MatmulRole
    rows: int
    columns: int
    count: int
    bytes: int
    experts: int = 0
    chosen: int = 0
    inputs: FlopType = "fp16"

    @property
    def share(self) -> float:
        """Share of the matrices that computes a token."""
        return self.chosen / self.experts if self.experts else 1.0

    @property
    def elements(self) -> int:
        """Numbers in all matrices."""
        return self.rows * self.columns * self.count

    @property
    def flops_per_token(self) -> float:
        """Multiplications and additions for one token."""
        return 2 * self.elements * self.share

    @property
    def bits(self) -> float:
        """Stored bits of a number, with its share of scales and zero points."""
        return 8 * self.bytes / self.elements

    @property
    def label(self) -> str:
        """Its role, number and shape in words."""
        return f"{self.count:,} x {self.role} [{self.rows:,}, {self.columns:,}]"


@dataclass(frozen=True)
class ModelShape:
    """A decoder, in the program's stored form.

    embedding_bytes   stored bytes of tables whose rows are gathered, unless the head reads the same
    query_heads       query heads of each attention layer
    measured_reach    share of a layer's experts that rows reach, as counted on text; () where it was not
    """

    name: str
    num_parameters: int
    num_layers: int
    hidden_size: int
    vocab_size: int
    context_tokens: int
    matmuls: tuple[Matmuls, ...]
    embedding_bytes: int
    query_heads: tuple[int, ...]
    kv: KVGeometry
    measured_reach: Reach = ()

    @property
    def matmul_bytes(self) -> int:
        """Bytes of all weights that matmuls read."""
        return sum(matmul.bytes for matmul in self.matmuls)

    @property
    def expert_bytes(self) -> int:
        """Those of experts."""
        return sum(matmul.bytes for matmul in self.matmuls if matmul.role == "expert")

    @property
    def flops_per_token(self) -> float:
        """Multiplications and additions of the matmuls of one token, the head left out."""
        return sum(matmul.flops_per_token for matmul in self.matmuls if matmul.role != "head")

    @property
    def experts(self) -> tuple[int, int]:
        """Experts of a layer, and those that compute a token; 0, 0 for a dense model."""
        return next(((one.experts, one.chosen) for one in self.matmuls if one.experts), (0, 0))

    @property
    def expert_reach(self) -> Reach:
        """Share of a layer's experts that rows reach: as measured, else as if all were equally likely."""
        experts, chosen = self.experts
        return self.measured_reach or (even_reach(experts, chosen) if experts else ())

    @property
    def num_expert_layers(self) -> int:
        """Layers with experts: as many as there are routers, or all where the program has none of their own."""
        return sum(one.count for one in self.matmuls if one.role == "router") or self.num_layers

    @cached_property
    def kv_token_bytes(self) -> float:
        """Bytes of KV that one token adds."""
        return self.kv.block_bytes / self.kv.block_tokens

    def kv_bytes(self, tokens: int) -> int:
        """Bytes of KV of a sequence of so many tokens, in whole blocks."""
        return -(-tokens // self.kv.block_tokens) * self.kv.block_bytes

    def read_tokens(self, context_tokens: float) -> float:
        """Mean tokens of KV that each layer reads for a token with that context: windows read less."""
        layers = self.kv.layers
        sizes = [layer.num_kv_heads * (layer.key_bytes + layer.value_bytes) for layer in layers]
        read = sum(
            s * min(context_tokens, layer.window or context_tokens) for s, layer in zip(sizes, layers, strict=True)
        )
        return read / sum(sizes) if sum(sizes) else 0.0

    @cached_property
    def attention_flops(self) -> float:
        """Multiplications and additions of one token's attention to one other token, over all layers."""
        dims = [layer.key_dim + (layer.value_dim or layer.key_dim) for layer in self.kv.layers]
        return float(sum(2 * heads * both for heads, both in zip(self.query_heads, dims, strict=True)))

    def with_weight_bits(self, bits: float) -> "ModelShape":
        """Return a shape whose linear layers and experts have so many bits a weight, and scales, if they have more."""
        stored = bits + _GROUP_BITS
        return self._with_layers(
            lambda one: replace(one, bytes=int(one.elements * stored / 8)) if one.bits > stored + 1 else one
        )

    def with_kv_type(self, dtype: KVType) -> "ModelShape":
        """Return a shape whose keys and values are of a type, unless that saves less than a fifth."""
        kv = self.kv.model_copy(update={"dtype": dtype})
        return replace(self, kv=kv) if kv.block_bytes < 0.8 * self.kv.block_bytes else self

    def with_scaled_matmuls(self, factor: float) -> "ModelShape":
        """Return a shape of the same depth and attention whose linear layers and experts are so many times as large."""
        return self._with_layers(
            lambda one: replace(one, rows=max(1, int(one.rows * factor)), bytes=int(one.bytes * factor))
        )

    def _with_layers(self, change: Callable[[Matmuls], Matmuls]) -> "ModelShape":
        matmuls = (change(one) if one.role in ("linear", "expert") else one for one in self.matmuls)
        return replace(self, matmuls=tuple(matmuls))


@dataclass(frozen=True)
class PlacedShape:
    """A device's part of a model that a recipe places on several devices, which compute one after the other.

    hardware     name of its row; None: that which a plan is made for
    entries      times in a step that it begins with values of another device
    entry_bytes  bytes that are copied to it then, for a row of the step
    """

    device: str
    hardware: str | None
    shape: ModelShape
    entries: int
    entry_bytes: float
