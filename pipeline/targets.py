"""What can be built for: one row of facts per target. To add a target, add a row, and its lowering as a pass."""

from dataclasses import dataclass
from typing import Literal

from ingot.errors import UsageError, did_you_mean, one_of


@dataclass(frozen=True)
class Target:
    """Facts of a target.

    lowering    passes, by name, that every program for it ends with
    """

    name: str
    engine: Literal["onnxruntime"]
    summary: str
    lowering: tuple[str, ...]


TARGETS: dict[str, Target] = {
    "cpu": Target(
        name="cpu",
        engine="onnxruntime",
        summary="Segments run by onnxruntime on the CPU, attention by Ingot's own kernel.",
        lowering=("fuse-rotary-attention", "lower-onnxruntime-cpu", "clean-up", "partition-at-attention"),
    ),
}


def get_target(name: str) -> Target:
    """The target of that name; UsageError with the nearest name when there is none."""
    if name not in TARGETS:
        raise UsageError(f"no target is named {name!r}; targets: {one_of(TARGETS)}.{did_you_mean(name, TARGETS)}")
    return TARGETS[name]
