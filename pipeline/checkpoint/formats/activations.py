"""How a layer's inputs are quantized: said in config.json, beside scales that were measured on a calibration text."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

KEY = "ingot.activations"  # metadata_props of a node whose input is quantized


@dataclass(frozen=True)
class ActivationScheme:
    """One layer's inputs.

    kind          int8, or fp8 e4m3
    dynamic       scales are made anew for every token; otherwise `scale` was measured
    strategy      one scale per token or per tensor
    scale         of a static scheme, float32; None where the checkpoint keeps it in a tensor of its own
    zero_point    of an asymmetric static scheme
    outliers      input channels that are kept in floats
    """

    bits: int
    kind: Literal["int", "float"]
    dynamic: bool
    strategy: Literal["token", "tensor"]
    symmetric: bool = True
    scale: float | None = None
    zero_point: int | None = None
    outliers: int = 0

    @property
    def words(self) -> str:
        """For messages and reports."""
        how = "dynamic" if self.dynamic else "static"
        return f"{'int' if self.kind == 'int' else 'fp'}{self.bits} {how} per {self.strategy}"

    def config(self) -> dict[str, Any]:
        """input_activations of compressed-tensors."""
        return {
            "num_bits": self.bits,
            "type": self.kind,
            "symmetric": self.symmetric,
            "strategy": self.strategy,
            "dynamic": self.dynamic,
            "group_size": None,
        }

    def tensors(self) -> dict[str, NDArray[Any]]:
        """input_scale and input_zero_point of a static scheme whose scale is known here."""
        if self.dynamic or self.scale is None:
            return {}
        found: dict[str, NDArray[Any]] = {"input_scale": np.array([self.scale], np.float32)}
        if self.zero_point is not None:
            found["input_zero_point"] = np.array([self.zero_point], np.int8)
        return found


def activations_of_config(values: Any) -> ActivationScheme | None:
    """compressed-tensors' input_activations; None for none. ValueError when the value is not understood."""
    if values is None:
        return None
    match values:
        case {"num_bits": int(bits), "type": ("int" | "float") as kind}:
            dynamic = bool(values.get("dynamic"))
            symmetric = bool(values.get("symmetric", True))
            match values.get("strategy") or ("token" if dynamic else "tensor"):
                case "token":
                    return ActivationScheme(bits, kind, dynamic, "token", symmetric)
                case "tensor":
                    return ActivationScheme(bits, kind, dynamic, "tensor", symmetric)
    raise ValueError(f"input_activations is {values!r}; per token and per tensor are known, of type int or float")


def activations_of_node(metadata: Mapping[str, str]) -> ActivationScheme | None:
    """What a quantization pass left on a node under "ingot.activations"; None when it left nothing."""
    if KEY not in metadata:
        return None
    known = {field.name for field in fields(ActivationScheme)}
    return ActivationScheme(**{key: value for key, value in json.loads(metadata[KEY]).items() if key in known})
