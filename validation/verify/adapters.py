"""LoRA adapters for verification: random ones that fit any program, so that no folder has to be given."""

from collections.abc import Sequence

import numpy as np

from ingot.artifact.programs.projections import Projection
from ingot.runtime.adapters import Adapter, LowRankUpdate
from ingot.runtime.engine.engine import Engine

NAMES = ("adapter-1", "adapter-2")
_RANK = 4
# Size of an entry of B A for inputs of unit size: enough to change most tokens, with finite logits.
_STRENGTH = 0.05


def load_adapters(engine: Engine) -> None:
    """Let requests of an engine name the adapters of NAMES."""
    for seed, name in enumerate(NAMES):
        engine.register_adapter(random_adapter(name, engine.projections, seed), f"(random, of seed {seed})")


def random_adapter(name: str, projections: Sequence[Projection], seed: int) -> Adapter:
    """An adapter of rank 4 that changes every projection; the same seed makes the same one."""
    rng = np.random.default_rng([seed, len(projections)])
    changes: dict[str, list[LowRankUpdate]] = {}
    for projection in projections:
        a = rng.normal(size=(_RANK, projection.columns)).astype(np.float32)
        b = rng.normal(size=(projection.rows, _RANK)).astype(np.float32)
        scale = np.float32(_STRENGTH / _RANK**0.5)
        low = LowRankUpdate(projection.module, projection.first_row, a, scale * b)
        changes.setdefault(projection.node, []).append(low)
    return Adapter(name, changes)
