"""Whether this machine has the card that a recipe's measurements take: asked before the work, not after it."""

from ingot.builder.options import is_measured
from ingot.errors import EngineError, UsageError
from ingot.pipeline.recipe.schema import Recipe
from ingot.pipeline.targets.table import get_target
from ingot.runtime.cuda.driver import open_device
from ingot.runtime.cuda.loading import runs_on


def require_card(recipe: Recipe) -> None:
    """UsageError where a recipe that measures is for cards, and this machine has none of them."""
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
        raise UsageError(_refusal(recipe, f"{name} has SM {sm}, and it is built for {', '.join(map(str, sms))}"))


def _refusal(recipe: Recipe, why: str) -> str:
    return (
        f"recipe {recipe.name} measures what it builds for target {recipe.target}, which takes such a card: {why}. "
        "Build without measuring (--set evaluation=null --set latency=null --set gates=null), and run "
        "`ingot validate ARTIFACT` where the card is"
    )
