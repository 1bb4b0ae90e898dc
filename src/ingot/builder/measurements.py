"""The measurements that a recipe requests: options for validation, and checks before a build that they can be made."""

from collections.abc import Mapping
from dataclasses import replace

from ingot.artifact import ModelFacts
from ingot.errors import DataError, EngineError, RequestError, UsageError
from ingot.pipeline.model.importer import ModelSource
from ingot.pipeline.recipe.schema import Recipe
from ingot.pipeline.recipe.sections import GateLimit
from ingot.pipeline.targets.table import get_target
from ingot.progress import note
from ingot.runtime import Tokenizer
from ingot.runtime.asking.prompts import checked_prompt
from ingot.runtime.cuda.driver.driver import open_device
from ingot.runtime.cuda.loading import runs_on
from ingot.runtime.text.tokenizer import TOKENIZER
from ingot.validation.evidence import MeasureOptions
from ingot.validation.gates import GateSpec
from ingot.validation.options import MIN_WINDOWS, AccuracyOptions, GenerationOptions
from ingot.validation.result import Origin
from ingot.validation.verify import VerifyOptions
from ingot.validation.windows import EvaluationText, read_text


def measure_options(recipe: Recipe) -> MeasureOptions:
    """Return the recipe's measurements and gates as validation's options."""
    evaluation = recipe.evaluation
    return MeasureOptions(
        text=recipe.evaluation_text(),
        accuracy=AccuracyOptions(evaluation.tokens, evaluation.window_tokens, recipe.seed) if evaluation else None,
        generation=_generation(recipe),
        latency=replace(recipe.latency, seed=recipe.seed) if recipe.latency else None,
        memory=recipe.memory,
        verify=VerifyOptions(quick=recipe.verify.quick, seed=recipe.seed) if recipe.verify else None,
        gates=gate_specs(recipe.applied_gates),
        num_threads=recipe.threads,
    )


def origin_of(recipe: Recipe, source: ModelSource) -> Origin:
    """Return names and digest of what the recipe is built from."""
    return Origin(recipe.name, recipe.require_checkpoint().name, source.checkpoint.digest)


def gate_specs(gates: Mapping[str, GateLimit]) -> tuple[GateSpec, ...]:
    """Return the recipe's gates as validation's."""
    return tuple(GateSpec(metric, gate.bound, gate.limit, gate.advisory) for metric, gate in gates.items())


def _generation(recipe: Recipe) -> GenerationOptions | None:
    """Return the generations to make; by default only where rounded keys and values add up over a generation."""
    if recipe.evaluation is None:
        return None
    prompts = recipe.evaluation.generations
    if prompts is None:
        drifts = any(made.compares_generations for made in recipe.make_passes())
        prompts = GenerationOptions.prompts if drifts else 0
    return GenerationOptions(prompts, output_tokens=recipe.evaluation.generation_tokens) if prompts else None


def missing_gpu(recipe: Recipe) -> str | None:
    """Return why this machine cannot run the recipe's program, because it lacks the GPU, or None."""
    target = get_target(recipe.target)
    sms = target.sms or recipe.gpu.sms
    if not sms:
        return None
    try:
        device = open_device()
    except EngineError as error:
        return str(error)
    name, sm = device.name, device.sm
    device.close()
    if any(runs_on(built, sm) for built in sms):
        return None
    return f"{name} has SM {sm}, and the program is for SM {', '.join(map(str, sms))}"


def require_gpu(recipe: Recipe) -> None:
    """Raise UsageError if the recipe measures a GPU program and this machine has no GPU that runs it."""
    missing = missing_gpu(recipe) if recipe.is_measured else None
    if missing is not None:
        raise UsageError(
            f"recipe {recipe.name} measures what it builds for target {recipe.target}, which needs such a GPU: "
            f"{missing}. Build without measuring (--set evaluation=null --set latency=null --set gates=null), and run "
            "`ingot validate ARTIFACT` on a machine with the GPU"
        )


def require_required_gates(recipe: Recipe) -> None:
    """Raise UsageError if the artifact would be sealed without a gate that must pass."""
    if recipe.has_required_gates:
        return
    gates = "only advisory gates" if recipe.applied_gates else "no gates"
    measured = f"measures, but has {gates}" if recipe.is_measured else "measures nothing"
    raise UsageError(
        f"recipe {recipe.name} {measured}, and gates are required (--require-gates): give an evaluation text "
        "(--set evaluation.text=FILE) and a gate, such as --set gates.perplexity_ratio.max=1.02"
    )


def require_tokenizer(recipe: Recipe) -> Tokenizer | None:
    """Return the checkpoint's tokenizer; None without one.

    Raises DataError if the recipe evaluates or generates text without it, ArtifactError if it is damaged.
    """
    folder = recipe.require_checkpoint_folder()
    if (folder / TOKENIZER).is_file():
        return Tokenizer.load(folder)
    if recipe.evaluation or recipe.generate:
        raise DataError(
            f"{folder}: holds no tokenizer.json, so no text can be evaluated or generated; copy "
            "it there, or build without text: --set evaluation=null --set generate=null"
        )
    return None


def bos_tokens(tokenizer: Tokenizer | None) -> int:
    """Return the number of tokens that the tokenizer puts before a text: 0, or 1 for BOS."""
    return int(tokenizer is not None and tokenizer.encode("")[:1] == [tokenizer.bos_token_id])


def require_texts(recipe: Recipe, tokenizer: Tokenizer | None, model: ModelFacts) -> Recipe:
    """Raise before any work if evaluation text or sample cannot be used with the tokenizer and the model.

    Returns the recipe with as many evaluation tokens as the text has, and notes it if they are fewer than it sets.
    DataError for a text that is missing or too short, or has tokens that the model does not have; UsageError for a
    sample's prompt that the model cannot continue.
    """
    if tokenizer is None:
        return recipe
    text, accuracy = recipe.evaluation_text(), measure_options(recipe).accuracy
    if text and accuracy:
        content, sha256 = read_text(text)
        tokens = tokenizer.encode(content, add_special_tokens=False)
        evaluated = EvaluationText(text.name, sha256, tuple(tokens))
        recipe, accuracy = _with_fitting_tokens(recipe, accuracy, evaluated)
        evaluated.require(accuracy)
        evaluated.require_vocabulary(model.vocab_size)
    if recipe.generate:
        try:
            checked_prompt(tokenizer.encode(recipe.generate.prompt), model)
        except RequestError as error:
            raise UsageError(f"recipe {recipe.name}: generate.prompt cannot be continued: {error}") from error
    return recipe


def _with_fitting_tokens(
    recipe: Recipe, accuracy: AccuracyOptions, text: EvaluationText
) -> tuple[Recipe, AccuracyOptions]:
    """Lower evaluation.tokens to whole windows that the text has, if these are enough; note it."""
    assert recipe.evaluation
    fitting = text.num_windows(accuracy) * accuracy.window_tokens
    if accuracy.num_windows * accuracy.window_tokens <= fitting or fitting < MIN_WINDOWS * accuracy.window_tokens:
        return recipe, accuracy
    has = f"{text.name} has {len(text.token_ids)} tokens"
    note(f"evaluation.tokens is {fitting} instead of {accuracy.tokens}: {has}")
    evaluation = recipe.evaluation.model_copy(update={"tokens": fitting})
    return recipe.model_copy(update={"evaluation": evaluation}), replace(accuracy, tokens=fitting)
