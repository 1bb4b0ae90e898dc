"""Choice of the engine that runs a program for the CPU: Ingot's own or onnxruntime, as the recipe's cpu.engine says.

`auto` tries to lower a copy of the model: its passes and its memory plan cost no more than reading the scales of the
weights. As with `native`, weights with codes of NaN are refused.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir

from ingot.errors import EngineError, PassError, UsageError
from ingot.passes.manager import PassManager
from ingot.passes.registry import make_pass
from ingot.pipeline.recipe.schema import Recipe
from ingot.pipeline.targets.cpu.lowering import lower_to_operations
from ingot.pipeline.targets.cpu.matrices import NotANumber
from ingot.pipeline.targets.table import NATIVE, Target, get_target
from ingot.progress import note
from ingot.runtime.cpu.native.program import program_library

_log = logging.getLogger(__name__)
FACTS = "cpu-engine"  # key in evidence/passes.json


@dataclass(frozen=True)
class EngineChoice:
    """A target, and why `auto` fell back to it, as a fact for the evidence; empty where it did not."""

    target: Target
    facts: Mapping[str, Any] = field(default_factory=dict)


def choose_target(recipe: Recipe, model: ir.Model) -> EngineChoice:
    """The target that the model, after the recipe's passes, is lowered for."""
    target = get_target(recipe.target)
    if target.name != NATIVE.name or recipe.cpu.engine == "onnxruntime":
        return EngineChoice(target)
    if recipe.cpu.engine == "native":
        return EngineChoice(NATIVE)
    reason = _why_not_native(model)
    if not reason:
        _log.info("cpu.engine auto: native computes every node and weight of the model")
        return EngineChoice(NATIVE)
    if recipe.cpu.attention != "float32":
        raise UsageError(f"cpu.attention is {recipe.cpu.attention}, but {reason}; set it to float32")
    note(f"cpu.engine auto: {target.engine}, because {reason}")
    return EngineChoice(target, {FACTS: {"engine": target.engine, "reason": reason}})


def _why_not_native(model: ir.Model) -> str:
    """Return why Ingot's own engine cannot run the model, or "". NotANumber for damaged weights."""
    try:
        program_library()
        copy = model.clone()
        PassManager([make_pass(name) for name in NATIVE.lowering]).run(copy)
        lower_to_operations(copy)
    except NotANumber:
        raise
    except (EngineError, PassError) as error:
        return f"the native engine cannot run it: {error}"
    return ""
