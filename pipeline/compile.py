"""The whole compile on one screen: checkpoint -> IR -> passes -> segments -> program on disk."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import Any

import onnx_ir as ir

from ingot.artifact import CALIBRATION_FILE, ArtifactWriter, GateOutcome, Manifest, ModelFacts
from ingot.artifact.programs.expert_choices import EXPERTS_FILE
from ingot.errors import ArtifactError, DataError, UsageError
from ingot.passes.base import Pass
from ingot.passes.calibration import CALIBRATION_FACTS, CalibrationFacts, calibrate_with
from ingot.passes.manager import PassManager, PassRecord
from ingot.passes.model_facts import EXPERT_CHOICES, KV, MODEL, Rows, pass_facts
from ingot.passes.quantization.quantize_weights import QUANTIZATION_FACTS, QuantizeWeights
from ingot.passes.recurrent_ops import recurrent_nodes
from ingot.passes.registry import make_pass, pass_names
from ingot.pipeline.calibrate import (
    CalibrationData,
    CalibrationEngine,
    HeldOutText,
    open_journal,
    read_calibration_data,
)
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.checkpoint.config.decoder import read_config
from ingot.pipeline.checkpoint.sealed import as_pruned, seal_checkpoint
from ingot.pipeline.model.importer import ModelSource
from ingot.pipeline.recipe.schema import PathError, Recipe
from ingot.pipeline.recipe.sections import CalibrationOptions
from ingot.pipeline.targets.cpu.draft_head import HeadModel
from ingot.pipeline.targets.cpu.engine_choice import choose_target
from ingot.pipeline.targets.table import (
    Target,
    get_target,
    require_experts,
    require_kv_type,
    require_latents,
    require_states,
)
from ingot.pipeline.targets.writers import Written, program_writer, require_packages
from ingot.progress import note
from ingot.runtime.text.chat_template import ChatTemplate
from ingot.version import __version__

Observer = Callable[[ir.Model, PassRecord], None]
TOOLS = ("numpy", "onnx", "onnx-ir", "onnxruntime", "tokenizers")


@dataclass(frozen=True)
class Compiled:
    """A program on disk, and the facts of it for manifest and evidence."""

    model: ModelFacts
    target: Target
    written: Written
    passes: tuple[PassRecord, ...]
    weights: Rows  # statistics of the quantized weights, a row each
    pass_facts: Mapping[str, Any]  # name of a pass -> facts that it recorded
    calibration: CalibrationFacts | None


def compile_recipe(
    recipe: Recipe, folder: Path, observe: Observer | None = None, source: ModelSource | None = None
) -> Compiled:
    """Compile the recipe's checkpoint into `folder`: program/, tokenizer/ and recipe.yaml, and calibration.json where a
    pass read calibration data.

    observe    called after every pass with the IR as it then is
    source     the recipe's checkpoint, where the caller has opened it

    Raises CheckpointError, PassError or BuildError; the caller removes the folder.
    """
    require_packages(get_target(recipe.target))
    source = source or open_source(recipe)  # checkpoint -> model
    _require_layers(recipe, source)
    passed = run_passes(recipe, source, observe)  # model -> passes
    model, target = passed.model, passed.target
    _require_kv_type(target, model)
    _require_stages(recipe, target)
    heads = [head] if (head := mtp_head(recipe, source, target)) else []
    written = program_writer(target)(model, folder, recipe, target, *heads)  # passes -> segments -> program
    _write_sources(recipe, as_pruned(source.checkpoint, model), model, folder)  # program -> artifact
    return Compiled(
        model=MODEL.of(model),
        target=target,
        written=written,
        passes=tuple(passed.records),
        weights=quantized.weights if (quantized := QUANTIZATION_FACTS.find(model)) else [],
        pass_facts={**pass_facts(model, pass_names()), **passed.facts},
        calibration=CALIBRATION_FACTS.find(model),
    )


def describe_artifact(
    writer: ArtifactWriter, recipe: Recipe, compiled: Compiled, name: str, gates: tuple[GateOutcome, ...] = ()
) -> Manifest:
    """Write the manifest of the files in the staging folder. May be called again after files were added."""
    return writer.describe(
        name=name,
        model=compiled.model,
        kv=compiled.written.kv,
        target=compiled.target.name,
        engine=compiled.target.engine,
        program=compiled.written.program,
        versions=tool_versions(compiled.written.tools),
        max_batch_tokens=recipe.engine.max_batch_tokens,
        serving=recipe.serving,
        gates=gates,
    )


def open_source(recipe: Recipe) -> ModelSource:
    """Open the recipe's checkpoint, with the recipe's chat template and adapter if it names them."""
    template = recipe.chat_template_file()
    if template is not None:
        _require_template(template)
    return ModelSource.open(recipe.require_checkpoint(), recipe.context_tokens, template, recipe.adapter_folder())


def _require_template(file: Path) -> None:
    """Raise DataError for a file that is not a jinja2 template."""
    try:
        ChatTemplate(file.read_text(encoding="utf-8"), file.name)
    except (OSError, UnicodeDecodeError, ArtifactError) as error:
        reason = f"is not UTF-8 text ({error})" if isinstance(error, UnicodeDecodeError) else str(error)
        raise DataError(f"chat_template {file}: {reason}") from error


@dataclass(frozen=True)
class Passed:
    """The IR after all passes, what each did, the target that they lowered it for, and facts of how that was chosen."""

    model: ir.Model
    records: list[PassRecord]
    target: Target
    facts: Mapping[str, Any]


def run_passes(recipe: Recipe, source: ModelSource, observe: Observer | None = None) -> Passed:
    """Check the weights, run the recipe's passes and the target's lowering."""
    passes = recipe.make_passes()
    counts_experts = _counts_experts(recipe, source)
    # It reads and checks the texts, before longer work.
    calibration = calibration_engine(recipe, source, passes, counts_experts=counts_experts)
    source.check_weights()
    model = source.copy()
    require_states(get_target(recipe.target), [node.op_type for node in recurrent_nodes(model.graph)])
    with calibrate_with(calibration):
        records = PassManager(passes, observe).run(model)
    if calibration is not None and counts_experts:
        calibration.count_experts(model)
    choice = choose_target(recipe, model)
    records += PassManager([make_pass(name) for name in choice.target.lowering], observe).run(model)
    return Passed(model, records, choice.target, choice.facts)


def mtp_head(recipe: Recipe, source: ModelSource, target: Target) -> HeadModel | None:
    """The checkpoint's MTP layer after passes of its own; None without one, and where the target has no heads.

    Its weights are rounded as the recipe's last rounding pass rounds linear layers, to nearest: a draft is verified, so
    an error costs speed and never a token. Table and head of the vocabulary are the model's own.
    """
    passes = recipe.make_passes()
    imported = source.mtp_head() if recipe.cpu.mtp else None
    if imported is None:
        return None
    changing = next((each for each in passes if not each.keeps_hidden_states), None)
    if changing is not None or not target.has_heads or recipe.place is not None:
        reason = f"{changing.name} changes hidden states" if changing else f"target {target.name} does not draft by it"
        reason = reason if recipe.place is None else "the model is placed on several devices"
        note(f"the checkpoint's MTP layer is left out: {reason}")
        return None
    own = [each for each in map(_of_head, passes) if each is not None]
    PassManager([*own, *(make_pass(name) for name in target.lowering)]).run(imported)
    return HeadModel(imported, source.mtp_hidden_state, source.last_norm)


def _of_head(each: Pass) -> Pass | None:
    """The pass as it runs on an MTP layer, without calibration data; None for one that does not."""
    if isinstance(each, QuantizeWeights):
        options = {key: getattr(each, key) for key in ("bits", "block_size", "symmetric", "clip", "scale_dtype")}
        return QuantizeWeights(**options, lm_head="none", embedding="none")
    return each if not each.is_lossy or each.kv_precision is not None else None


def tool_versions(others: Iterable[str] = ()) -> dict[str, str]:
    """Versions of Python, of Ingot, of TOOLS and of the other packages that took part in the build."""
    return {"python": python_version(), "ingot": __version__, **{name: version(name) for name in (*TOOLS, *others)}}


def calibration_engine(
    recipe: Recipe, source: ModelSource, passes: Sequence[Pass], *, counts_experts: bool = False
) -> CalibrationEngine | None:
    """The service that runs the model on the recipe's calibration data; None where no pass or count needs it."""
    is_needed = any(pass_.needs_calibration for pass_ in passes)
    if recipe.calibration is None or not (is_needed or counts_experts):
        return None
    data = _read_calibration(recipe, recipe.calibration, source)
    journal = open_journal(lambda: source.checkpoint.digest, data, tool_versions()) if is_needed else None
    return CalibrationEngine(
        data,
        threads=recipe.threads,
        journal=journal,
        reference=source.copy,
        expert_tokens=recipe.calibration.expert_tokens,
    )


def _counts_experts(recipe: Recipe, source: ModelSource) -> bool:
    options = recipe.calibration
    return options is not None and options.text is not None and options.count_experts and _has_experts(source)


def _has_experts(source: ModelSource) -> bool:
    return any(layer.experts is not None for layer in read_config(source.checkpoint).layers)


def _read_calibration(recipe: Recipe, options: CalibrationOptions, source: ModelSource) -> CalibrationData:
    facts = source.facts
    if options.sequence_tokens > facts.context_tokens and recipe.sets("calibration.sequence_tokens"):
        raise UsageError(
            f"calibration.sequence_tokens is {options.sequence_tokens}; the model's context holds "
            f"{facts.context_tokens}: set it to that or less"
        )
    return read_calibration_data(
        recipe.calibration_text(),
        source.checkpoint.folder,
        options.sequences,
        min(options.sequence_tokens, facts.context_tokens),
        options.seed,
        facts.vocab_size,
        packing=options.packing,
        chat_template=options.chat_template,
        field=options.field,
        template_file=source.checkpoint.chat_template,
        held_out=_held_out(recipe),
    )


def _held_out(recipe: Recipe) -> HeldOutText | None:
    """The evaluation text; None without one, and where it is missing: a build refuses that, an export does not."""
    try:
        file = recipe.evaluation_text()
    except PathError:
        return None
    return HeldOutText(file, recipe.evaluation.tokens) if file and recipe.evaluation else None


def _require_layers(recipe: Recipe, source: ModelSource) -> None:
    """Raise UsageError for layers that the target does not compute: now, not after hours of passes."""
    config = read_config(source.checkpoint)
    if _has_experts(source):
        require_experts(get_target(recipe.target), config.model_type)
    if config.latent is not None:
        require_latents(get_target(recipe.target), config.model_type)


def _require_kv_type(target: Target, model: ir.Model) -> None:
    kv = KV.of(model)
    if kv.dtype != "float32":  # the importer's; the target may store another float
        require_kv_type(target, kv.dtype, kv.int4_group)


def _require_stages(recipe: Recipe, target: Target) -> None:
    """Raise UsageError for `place` where cpu.engine auto chose an engine that does not run stages."""
    if recipe.place is not None and not target.stages_on:
        raise UsageError(
            f"place divides programs of the native CPU engine and of cuda targets, and this model is run by"
            f" {target.engine}; remove place and devices"
        )


def _write_sources(recipe: Recipe, checkpoint: Checkpoint, model: ir.Model, folder: Path) -> None:
    """Write configuration and tokenizer, the recipe, facts of the calibration data, and counts of experts."""
    seal_checkpoint(checkpoint, folder)
    (folder / "recipe.yaml").write_text(recipe.resolved_yaml(), encoding="utf-8")
    if (facts := CALIBRATION_FACTS.find(model)) is not None:
        text = json.dumps(facts.as_json(), indent=2)
        (folder / CALIBRATION_FILE).write_text(f"{text}\n", encoding="utf-8")
    if (choices := EXPERT_CHOICES.find(model)) is not None:
        (folder / EXPERTS_FILE).write_text(choices.model_dump_json(), encoding="utf-8")
