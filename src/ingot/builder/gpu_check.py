"""Checks before a build that this machine has the GPU that the recipe's measurements need."""

from ingot.builder.options import is_measured
from ingot.errors import EngineError, UsageError
from ingot.pipeline.recipe.schema import Recipe
from ingot.pipeline.targets.table import get_target
from ingot.runtime.cuda.driver import open_device
from ingot.runtime.cuda.loading import runs_on


def require_gpu(recipe: Recipe) -> None:
    """Raise UsageError if the recipe measures a program for GPUs, and this machine has no such GPU."""
    target = get_target(recipe.target)
    sms = target.sms or recipe.gpu.sms
    if not sms or not is_measured(recipe):
        return
    try:
        device = open_device()
    except EngineError as error:
        raise UsageError(_refusal(recipe, str(error))) from error
    name, sm = device.name, device.sm
    device.close()
    if not any(runs_on(built, sm) for built in sms):
        raise UsageError(_refusal(recipe, f"{name} has SM {sm}, and the program is for SM {', '.join(map(str, sms))}"))


def _refusal(recipe: Recipe, why: str) -> str:
    return (
        f"recipe {recipe.name} measures what it builds for target {recipe.target}, which needs such a GPU: {why}. "
        "Build without measuring (--set evaluation=null --set latency=null --set gates=null), and run "
        "`ingot validate ARTIFACT` on a machine with the GPU"
    )
