"""The models, texts, widths and chains of passes of the comparison (peers.py), as tables.

To add a model or a chain, add a row. Data is read from INGOT_TEST_DATA, else from ../shared/data.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from benchmarks.paths import ROOT
from ingot.passes.base import Pass
from ingot.passes.registry import load_pass_class, make_pass

FUSIONS = ("fold-constants", "pack-projections", "fuse-gated-activation")


@dataclass(frozen=True)
class RealModel:
    """A model and its texts, below the data's folder.

    calibration   None: the second half of the evaluation text, which is then scored on the first half alone
    group_sizes   the largest size up to 128 that divides every quantized matrix's width, and 32 where that is another
    keep          layers that stay unquantized, because no group size of the formats divides their width
    """

    name: str
    evaluation: str
    calibration: str | None
    group_sizes: tuple[int, ...]
    keep: tuple[str, ...] = ()

    @property
    def checkpoint(self) -> Path:
        """The Hugging Face folder."""
        return data_folder() / "models" / self.name


MODELS: dict[str, RealModel] = {
    model.name: model
    for model in (
        RealModel("stdlib-llama-6m", "eval/stdlib-heldout.txt", None, (128, 32)),
        RealModel(
            "babyllama-105", "eval/tinystories-valid-excerpt.txt", "eval/tinystories-train-excerpt.txt", (32,)
        ),  # widths 128 and 352 = 11 * 32
        RealModel(
            "stories260K",
            "eval/tinystories-valid-excerpt.txt",
            "eval/tinystories-train-excerpt.txt",
            (64, 32),
            keep=("down_proj",),  # 172 = 4 * 43
        ),
    )
}


@dataclass(frozen=True)
class Step:
    """A pass of a chain with the options that the chain's name implies; the case adds bits and blocks."""

    name: str
    options: Mapping[str, object] = field(default_factory=dict)

    def make(self, setting: "Setting") -> Pass:
        """Make the pass with those of the setting's options that it has."""
        if self.name == "mixed-precision":
            return make_pass(self.name, {**setting.budget, **self.options})
        known = {option.name for option in fields(load_pass_class(self.name))}
        given = {name: value for name, value in setting.options.items() if name in known}
        return make_pass(self.name, {**given, **self.options})


@dataclass(frozen=True)
class Setting:
    """Bits, columns that share a scale, with or without zero points, and the layers left alone."""

    bits: int
    group_size: int
    symmetric: bool
    keep: tuple[str, ...] = ()

    @property
    def options(self) -> dict[str, Any]:
        """The options for every pass of a chain that has them; head and embedding stay unquantized."""
        return {
            "bits": self.bits,
            "block_size": self.group_size,
            "symmetric": self.symmetric,
            "lm_head": "none",
            "embedding": "none",
            "overrides": {f"*{name}*": "none" for name in self.keep},
        }

    @property
    def budget(self) -> dict[str, Any]:
        """The options of mixed-precision: the size of the other packages' files in this setting."""
        return {
            "same_size_as": {"bits": self.bits, "block_size": self.group_size},
            "symmetric": self.symmetric,
            "count": "nominal",
            "exclude": [f"*{name}*" for name in self.keep],
        }


_SEARCHED_FOR_GPTQ = {"rounding": "gptq", "steps": 5}
CHAINS: dict[str, tuple[Step, ...]] = {
    "RTN": (Step("quantize-weights", {"clip": False}),),
    "RTN, clip": (Step("quantize-weights"),),
    "AWQ": (Step("awq"), Step("quantize-weights")),
    "GPTQ, plain": (Step("gptq", {"refine": 0}),),
    "GPTQ": (Step("gptq"),),
    "AWQ + GPTQ": (Step("awq", _SEARCHED_FOR_GPTQ), Step("gptq")),
    "GPTQ + distill": (Step("gptq"), Step("distill")),
    "mixed + GPTQ": (Step("mixed-precision", {"rounding": "gptq"}), Step("gptq")),
    "mixed + GPTQ + distill": (Step("mixed-precision", {"rounding": "gptq"}), Step("gptq"), Step("distill")),
    "rotate + GPTQ": (Step("rotate"), Step("gptq")),
    "rotate + AWQ + GPTQ": (Step("rotate"), Step("awq", _SEARCHED_FOR_GPTQ), Step("gptq")),
}


def data_folder() -> Path:
    """Folder of models and texts."""
    return Path(os.environ.get("INGOT_TEST_DATA") or ROOT.parent / "shared" / "data")


def make_chain(name: str, setting: Setting) -> list[Pass]:
    """The fusions that every target begins with, then the chain's passes."""
    return [*(make_pass(fusion) for fusion in FUSIONS), *(step.make(setting) for step in CHAINS[name])]
