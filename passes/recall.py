"""A calibrated pass's decisions as arrays, and back: what CalibrationStage.remember is given and recall gives.

    known, made = stage.recall(), {}
    ...
    rounder = Recalled(known, name) if known is not None else ...       # rounds the weight of that name
    made |= weight_arrays(name, rounded, facts)
    ...
    if known is None:
        stage.remember(made)

Everything comes back bit for bit, floats among the facts, too.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingot.passes.calibration import Arrays
from ingot.passes.quantization.rounding import RoundedWeight


def fact_arrays(name: str, facts: Mapping[str, object]) -> dict[str, NDArray[Any]]:
    """JSON values under a name."""
    return {f"{name}.facts": np.frombuffer(json.dumps(dict(facts)).encode(), np.uint8)}


def recalled_facts(arrays: Arrays, name: str) -> dict[str, Any]:
    """What fact_arrays was given."""
    facts: dict[str, Any] = json.loads(arrays[f"{name}.facts"].tobytes())
    return facts


def weight_arrays(name: str, rounded: RoundedWeight, facts: Mapping[str, object]) -> dict[str, NDArray[Any]]:
    """A rounded weight, and facts about it, under a name."""
    values = {field.name: getattr(rounded, field.name) for field in fields(rounded)}
    arrays = {f"{name}.{key}": value for key, value in values.items() if isinstance(value, np.ndarray)}
    numbers = {key: value for key, value in values.items() if isinstance(value, float)}
    return {**arrays, **fact_arrays(name, {"facts": dict(facts), "numbers": numbers})}


@dataclass
class Recalled:
    """Gives the weight of that name as it was rounded before, whatever the values are."""

    arrays: Arrays
    name: str
    facts: dict[str, object] = field(default_factory=dict)

    def __call__(self, values: NDArray[Any]) -> RoundedWeight:
        found = recalled_facts(self.arrays, self.name)
        self.facts = found["facts"]
        parts = {field.name: self.arrays.get(f"{self.name}.{field.name}") for field in fields(RoundedWeight)}
        return RoundedWeight(**{**parts, **found["numbers"]})
