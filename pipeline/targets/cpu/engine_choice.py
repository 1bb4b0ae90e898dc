"""Choice of the engine that runs a program for the CPU: Ingot's own or onnxruntime, as the recipe's cpu.engine says.

`auto` tries to lower a copy of the model: its passes and its memory plan cost no more than reading the scales of the
weights. As with `native`, weights with codes of NaN are refused.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import onnx_ir as ir

from ingot.errors import EngineError, PassError, UsageError
from ingot.passes.manager import PassManager
from ingot.passes.registry import make_pass
from ingot.pipeline.recipe.schema import Recipe
from ingot.pipeline.recipe.sections import GPU_LAYERS, Place
from ingot.pipeline.targets.cpu.lowering import lower_to_operations
from ingot.pipeline.targets.cpu.matrices import NotANumber
from ingot.pipeline.targets.table import NATIVE, Target, get_target
from ingot.progress import note
from ingot.runtime.cpu.native.library import native_library
from ingot.runtime.cpu.native.program import program_library

_log = logging.getLogger(__name__)
_FAULTS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    IndexError,
    KeyError,
    TypeError,
    ValueError,
)
FACTS = "cpu-engine"  # key in evidence/passes.json


@dataclass(frozen=True)
class EngineChoice:
    """A target, and why `auto` fell back to it, as a fact for the evidence; empty where it did not."""

    target: Target
    facts: Mapping[str, Any] = field(default_factory=dict)


def choose_target(recipe: Recipe, model: ir.Model) -> EngineChoice:
    """The target that the model, after the recipe's passes, is lowered for."""
    target = get_target(recipe.target)
    if recipe.place is not None and "cuda" in target.stages_on:
        return EngineChoice(_with_host(target, recipe.place))
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
    if problem := _why_no_library():
        _log.warning(
            "%s: this artifact is made for %s, and is slower and has another identity than one for Ingot's own engine",
            problem,
            target.engine,
        )
    note(f"cpu.engine auto: {target.engine}, because {reason}")
    return EngineChoice(target, {FACTS: {"engine": target.engine, "reason": reason}})


def _with_host(target: Target, place: Place) -> Target:
    """The target of a model that is divided among a GPU and the host, which has all of it with {gpu_layers: 0}."""
    if not isinstance(place, str) and place.get(GPU_LAYERS) == 0:
        return NATIVE
    writer = "ingot.pipeline.targets.cuda.host_stage:write_divided_program"
    return replace(target, lowering=NATIVE.lowering, writer=writer)


def _why_no_library() -> str:
    """Return why there is no native engine on this machine, or ""."""
    try:
        return "" if native_library() is not None else "Ingot was installed without a C compiler"
    except EngineError:
        return "The library of Ingot's own engine cannot be loaded"


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
    except _FAULTS as error:
        _log.warning("the lowering for the native engine failed", exc_info=True)
        kind = type(error).__name__
        return f"lowering it for the native engine failed ({kind}: {error}), a bug in Ingot: please report it"
    return ""
