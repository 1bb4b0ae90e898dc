"""Quantization of a layer's inputs, as config.json or a node's metadata records it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from ingot.errors import shown

Strategy = Literal["token", "tensor", "group", "tensor_group"]
GROUPED = ("group", "tensor_group")
CONTRADICTION = "contradiction"  # type of a PydanticCustomError about several keys of an object
KEY = "ingot.activations"  # metadata_props of a node whose input is quantized


@dataclass(frozen=True)
class InputScheme:
    """Quantization of one layer's inputs.

    kind          "int" for int8, "float" for fp8 e4m3
    dynamic       scales are computed for every token; otherwise they were measured on a calibration text
    strategy      one scale per token, per tensor, or per group of `group_size` columns of a token; "tensor_group" has a
                  scale of the tensor as well
    is_local      only the scales of groups are dynamic; that of the tensor is static
    scale         a static scheme's scale, float32; None if the checkpoint stores it in a tensor of its own
    zero_point    an asymmetric static scheme's zero point
    outliers      number of input channels that stay in floats
    """

    bits: int
    kind: Literal["int", "float"]
    dynamic: bool
    strategy: Strategy
    symmetric: bool = True
    scale: float | None = None
    zero_point: int | None = None
    outliers: int = 0
    group_size: int | None = None
    is_local: bool = False

    @property
    def words(self) -> str:
        """The scheme as text, for messages and reports."""
        how = "dynamic" if self.dynamic else "static"
        per = f"group of {self.group_size}" if self.group_size else self.strategy.replace("_", " ")
        return f"{'int' if self.kind == 'int' else 'fp'}{self.bits} {how} per {per}"

    def config(self) -> dict[str, Any]:
        """Return the scheme as compressed-tensors' input_activations."""
        return {
            "num_bits": self.bits,
            "type": self.kind,
            "symmetric": self.symmetric,
            "strategy": self.strategy,
            "dynamic": "local" if self.is_local else self.dynamic,
            "group_size": self.group_size,
        }

    def tensors(self) -> dict[str, NDArray[Any]]:
        """Return input_scale and input_zero_point of a static scheme; nothing if `scale` is None."""
        if self.dynamic or self.scale is None:
            return {}
        found: dict[str, NDArray[Any]] = {"input_scale": np.array([self.scale], np.float32)}
        if self.zero_point is not None:
            found["input_zero_point"] = np.array([self.zero_point], np.int8)
        return found


class InputActivations(BaseModel):
    """compressed-tensors' input_activations."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")

    num_bits: int
    type: Literal["int", "float"]
    dynamic: bool | Literal["local"] | None = False
    symmetric: bool = True
    strategy: Strategy | None = None
    group_size: int | None = None

    @model_validator(mode="after")
    def _has_groups(self) -> Self:
        if self.strategy in GROUPED and (self.group_size is None or self.group_size < 1):
            message = f"group_size is {shown(self.group_size)}; {self.strategy} needs a number from 1"
            raise PydanticCustomError(CONTRADICTION, message)
        return self

    @property
    def scheme(self) -> InputScheme:
        """The scheme; without a strategy, dynamic scales are per token and static ones per tensor."""
        dynamic = bool(self.dynamic)
        strategy = self.strategy or ("token" if dynamic else "tensor")
        return InputScheme(
            self.num_bits,
            self.type,
            dynamic,
            strategy,
            self.symmetric,
            group_size=self.group_size if strategy in GROUPED else None,
            is_local=self.dynamic == "local",
        )


def activations_of_node(metadata: Mapping[str, str]) -> InputScheme | None:
    """Return the scheme that a quantization pass recorded in a node's metadata; None if there is no record."""
    if KEY not in metadata:
        return None
    known = {field.name for field in fields(InputScheme)}
    return InputScheme(**{key: value for key, value in json.loads(metadata[KEY]).items() if key in known})
