"""What can be built for: one row of facts per target. To add a target, add a row, and its lowering as a pass."""

from dataclasses import dataclass
from typing import Literal

from ingot.errors import UsageError, did_you_mean, one_of


@dataclass(frozen=True)
class Target:
    """Facts of a target.

    weight_bits     bits per weight that its engine has kernels for
    kv_dtypes       what its KV pool can hold
    block_tokens    tokens of a KV block, unless the recipe says otherwise
    lowering        passes, by name, that every program for it ends with
    """

    name: str
    engine: Literal["onnxruntime"]
    summary: str
    weight_bits: tuple[int, ...]
    kv_dtypes: tuple[str, ...]
    block_tokens: int
    lowering: tuple[str, ...]


TARGETS: dict[str, Target] = {
    "cpu": Target(
        name="cpu",
        engine="onnxruntime",
        summary="Segments run by onnxruntime on the CPU, attention by Ingot's own kernel.",
        weight_bits=(4, 8, 16, 32),
        kv_dtypes=("float32",),
        block_tokens=16,
        lowering=("lower-onnxruntime-cpu", "clean-up", "partition-at-attention"),
    ),
}


def get_target(name: str) -> Target:
    """The target of that name; UsageError with the nearest name when there is none."""
    if name not in TARGETS:
        raise UsageError(f"no target is named {name!r}; targets: {one_of(TARGETS)}.{did_you_mean(name, TARGETS)}")
    return TARGETS[name]
