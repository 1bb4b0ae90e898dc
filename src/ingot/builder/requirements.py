"""Requirements that a build checks before its work: the evaluation text, its tokenizer, the GPU to measure on."""

from ingot.builder.options import is_measured, measure_options
from ingot.errors import DataError, EngineError, UsageError
from ingot.pipeline.recipe.schema import Recipe
from ingot.pipeline.targets.table import get_target
from ingot.runtime import Tokenizer
from ingot.runtime.cuda.driver import open_device
from ingot.runtime.cuda.loading import runs_on
from ingot.validation.windows import EvaluationText, read_text


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


def require_text(recipe: Recipe) -> None:
    """Refuse, before the work, a text that is missing or too short and a checkpoint without the tokenizer for it."""
    text = recipe.evaluation_text()
    folder = recipe.require_checkpoint_folder()
    if (text or recipe.generate) and not (folder / "tokenizer.json").is_file():
        raise DataError(
            f"{folder}: holds no tokenizer.json, so no text can be evaluated or generated; copy "
            "it there, or build without text: --set evaluation=null --set generate=null"
        )
    accuracy = measure_options(recipe).accuracy
    if text and accuracy:
        content, sha256 = read_text(text)
        tokens = Tokenizer.load(folder).encode(content, add_special_tokens=False)
        EvaluationText(text.name, sha256, tuple(tokens)).require(accuracy)


def _refusal(recipe: Recipe, why: str) -> str:
    return (
        f"recipe {recipe.name} measures what it builds for target {recipe.target}, which needs such a GPU: {why}. "
        "Build without measuring (--set evaluation=null --set latency=null --set gates=null), and run "
        "`ingot validate ARTIFACT` on a machine with the GPU"
    )
