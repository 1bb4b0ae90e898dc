"""Recurrent layers: their sizes, and where each has its part of a sequence's side state.

    convolution   the last taps - 1 inputs, [taps - 1, channels]
    delta-rule    a matrix [key_dim, value_dim] for each value head
    scan          a matrix [state_dim, head_dim] for each head

All are float32. The columns of a matrix are padded to whole LANES and stored in tiles of STATE_TILE, the last one
narrower, each [rows, width] (runtime/cpu/native/recurrent.h). A program keeps these sizes with each operation or step,
and the KV geometry the place of each part.
"""

from collections.abc import Iterable, Sequence
from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from ingot.artifact.programs.state_parts import PART_BYTES, StatePart
from ingot.sizes import round_up

LANES = 16
STATE_TILE = 64  # columns of a head's state, so that a tile stays in the first cache
CHANNEL_TILE = 256  # channels that a thread convolves at once
MAX_KEY_DIM = 1024  # keys of a token that a kernel keeps at hand
MAX_TAPS = 64
_FLOAT_BYTES = 4

_Size = Annotated[int, Field(ge=1, lt=2**20)]


class _Facts(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    operation: ClassVar[str]
    """The kind of its operation in a CPU program."""

    layer: int = Field(ge=0, lt=2**16)


class ConvolutionFacts(_Facts):
    """y[t] = activation(bias + sum over j of weight[:, j] * x[t - taps + 1 + j]) in each channel."""

    operation = "convolve"

    channels: _Size
    taps: int = Field(ge=1, le=MAX_TAPS)
    activation: Literal["none", "silu"] = "none"

    @property
    def state_floats(self) -> int:
        """Size of the state."""
        return (self.taps - 1) * self.channels

    @property
    def widths(self) -> dict[str, int]:
        """Columns of the operands and of the output."""
        return {"input": self.channels, "output": self.channels}


class DeltaRuleFacts(_Facts):
    """S = e^decay S; S += k (beta (v - S^T k))^T; y = scale S^T q in each value head h.

    It reads the query and key of head h // (num_value_heads / num_key_heads), which are divided by their lengths if
    `normalize`: x / sqrt(sum of x^2 + 1e-6).
    """

    operation = "delta-rule"

    num_key_heads: _Size
    num_value_heads: _Size
    key_dim: int = Field(ge=1, le=MAX_KEY_DIM)
    value_dim: _Size
    scale: float = Field(allow_inf_nan=False)
    normalize: bool = False

    @property
    def state_floats(self) -> int:
        """Size of the state."""
        return self.num_value_heads * self.key_dim * round_up(self.value_dim, LANES)

    @property
    def widths(self) -> dict[str, int]:
        """Columns of the operands and of the output."""
        keys, values = self.num_key_heads * self.key_dim, self.num_value_heads * self.value_dim
        heads = self.num_value_heads
        return {"query": keys, "key": keys, "value": values, "decay": heads, "beta": heads, "output": values}


class ScanFacts(_Facts):
    """S = e^(dt A) S + B (dt x)^T; y = S^T C + D x in each head h, with B and C of its group (Mamba-2)."""

    operation = "scan"

    num_heads: _Size
    head_dim: _Size
    state_dim: _Size
    num_groups: _Size

    @property
    def state_floats(self) -> int:
        """Size of the state."""
        return self.num_heads * self.state_dim * round_up(self.head_dim, LANES)

    @property
    def widths(self) -> dict[str, int]:
        """Columns of the operands and of the output."""
        values, states = self.num_heads * self.head_dim, self.num_groups * self.state_dim
        return {"input": values, "dt": self.num_heads, "b": states, "c": states, "output": values}


RecurrentFacts: TypeAlias = ConvolutionFacts | DeltaRuleFacts | ScanFacts


def kind_of(facts: RecurrentFacts) -> Literal["convolution", "delta-rule", "scan"]:
    """The kind of a layer's part of the state."""
    match facts:
        case ConvolutionFacts():
            return "convolution"
        case DeltaRuleFacts():
            return "delta-rule"
        case ScanFacts():
            return "scan"


def place_states(layers: Iterable[RecurrentFacts]) -> tuple[tuple[StatePart, ...], int]:
    """Places of the layers' states one after another, and the bytes of all. A convolution of one tap has none."""
    parts, at = [], 0
    for facts in layers:
        size = facts.state_floats * _FLOAT_BYTES
        if size:
            parts.append(StatePart(layer=facts.layer, kind=kind_of(facts), offset=at, bytes=size))
            at = round_up(at + size, PART_BYTES)
    return tuple(parts), at


def problem_of_sizes(facts: RecurrentFacts) -> str | None:
    """Return the contradiction in the sizes of a layer, or None."""
    match facts:
        case DeltaRuleFacts() if facts.num_value_heads % facts.num_key_heads:
            return f"has {facts.num_value_heads} value heads over {facts.num_key_heads} key heads"
        case ScanFacts() if facts.num_heads % facts.num_groups:
            return f"has {facts.num_heads} heads in {facts.num_groups} groups"
    return None


def problem_of_unused(layers: Iterable[RecurrentFacts], parts: Sequence[StatePart], state_bytes: int) -> str | None:
    """Return a problem if no layer uses the side state or one of its parts, or None."""
    if state_bytes and not parts:
        return f"the KV geometry has {state_bytes} bytes of side state, and not which layers keep them"
    used = {(facts.layer, kind_of(facts)) for facts in layers}
    unused = next((part for part in parts if (part.layer, part.kind) not in used), None)
    if unused is None:
        return None
    return f"the KV geometry has state for a {unused.kind} in layer {unused.layer}, which the program does not compute"


def problem_of_state(facts: RecurrentFacts, parts: Iterable[StatePart]) -> str | None:
    """Return why a layer's state does not fit its part among `parts`, or None."""
    kind, size = kind_of(facts), facts.state_floats * _FLOAT_BYTES
    own = next((part for part in parts if (part.layer, part.kind) == (facts.layer, kind)), None)
    stored = own.bytes if own else 0
    if stored != size:
        return f"keeps {size} bytes of state ({kind} of layer {facts.layer}); the KV geometry has {stored} for it"
    return None
