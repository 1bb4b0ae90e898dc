"""The schema of a recipe: what to build and what must hold. Frozen, validated, with every default filled in.

load.py makes a Recipe from YAML; docs/recipes.md documents every key. To add a key: its field here or in sections.py
with a description, its line in docs/recipes.md, and the code that reads it.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Self

import yaml
from pydantic import BeforeValidator, Field, PrivateAttr

from ingot.artifact.manifest import CPU_ENGINES, EngineKind
from ingot.artifact.metrics import METRICS
from ingot.artifact.programs.launch_program import TILES_FILE
from ingot.artifact.programs.stages import MOST_DEVICES
from ingot.artifact.section import Section
from ingot.artifact.serving import ServingOptions
from ingot.errors import LONGEST_PATH, NAME_PATTERN, Problem, UsageError, shown, shown_path
from ingot.passes.base import Pass
from ingot.pipeline.recipe.sections import (
    AUTO,
    MOST_SEED,
    CalibrationOptions,
    ContextTokens,
    CpuOptions,
    DeviceShare,
    EngineSizes,
    EvaluationOptions,
    GateLimit,
    GenerateOptions,
    GivenPath,
    GpuOptions,
    LatencySection,
    MemorySection,
    PassEntry,
    Place,
    RecipePath,
    StreamedRows,
    Threads,
    VerifyRecipeOptions,
    WholeNumber,
    check_place,
    check_stream_experts,
)
from ingot.pipeline.recipe.shipped import source_only
from ingot.pipeline.recipe.yaml import Located
from ingot.validation.options import MemoryOptions

MOST_PASSES = 100
TEMPLATE_FILE = "tokenizer/chat_template.jinja"  # path within an artifact
IN_CHECKPOINT = "checkpoint:"  # prefix of a text in the checkpoint's folder


@dataclass(frozen=True)
class _Places:
    """Places of a recipe's keys in its file; None for a recipe made in Python. They do not count when comparing."""

    root: Located | None = field(default=None, compare=False)


class PathError(UsageError):
    """A path of a recipe that is missing: the key, and the message without the recipe's name."""

    def __init__(self, recipe: str, key: str, message: str) -> None:
        super().__init__(f"recipe {recipe}{'' if message.startswith('names no ') else ':'} {message}")
        self.key = key
        self.message = message


class Recipe(Section):
    """What to build, from which checkpoint, how to measure it, and what must hold."""

    name: str = Field(
        pattern=NAME_PATTERN,
        max_length=128,
        description="name of recipe and artifact; default: the file's name",
    )
    description: str = Field(default="", description="one sentence for `ingot recipes`")
    checkpoint: GivenPath | None = Field(default=None, description="checkpoint folder, relative to this recipe")
    adapter: GivenPath | None = Field(
        default=None,
        description="folder of a LoRA adapter (PEFT) that is merged into the checkpoint, relative to this recipe",
    )
    chat_template: GivenPath | None = Field(
        default=None, description="jinja file that replaces the checkpoint's chat template, relative to this recipe"
    )
    target: str = Field(default="cpu", description="what to build for")
    context_tokens: ContextTokens | None = Field(
        default=None, description="longest sequence; null: the model's own limit"
    )
    output: str | None = Field(default=None, min_length=1, description="artifact folder; null: artifacts/NAME")
    passes: tuple[PassEntry, ...] = Field(
        default=(), max_length=MOST_PASSES, description="passes in order, each a name or {name: {option: value}}"
    )
    engine: EngineSizes = Field(default=EngineSizes(), description="sizes that the runtime is built for")
    serving: ServingOptions | None = Field(
        default=None, description="defaults of `Engine.load` that the artifact keeps; null: those of the runtime"
    )
    cpu: CpuOptions = Field(default=CpuOptions(), description="options of programs for the CPU")
    gpu: GpuOptions = Field(default=GpuOptions(), description="options of programs for GPUs")
    devices: tuple[DeviceShare, ...] = Field(
        default=(),
        max_length=MOST_DEVICES,
        description="devices that `place` divides the model among, the fastest first: [{cuda: 8GiB}, {cpu: 64GiB}]",
    )
    place: Annotated[Place, BeforeValidator(check_place)] | None = Field(
        default=None,
        description="what is on which device: auto, {auto: ROWS}, {gpu_layers: N}, {host: experts}, {PATTERN: DEVICE}; "
        "null: on one",
    )
    stream_experts: Annotated[StreamedRows, BeforeValidator(check_stream_experts)] = Field(
        default=AUTO,
        description="rows of a step from which on the GPU computes the host's experts, copying their weights; "
        "auto: where it pays; 0: never",
    )
    calibration: CalibrationOptions | None = Field(
        default=None, description="data for calibrated passes and counts of chosen experts; null for none"
    )
    evaluation: EvaluationOptions | None = Field(default=None, description="accuracy measurement; null for none")
    latency: LatencySection | None = Field(default=None, description="latency measurement; null for none")
    memory: MemorySection | None = Field(
        default=MemoryOptions(), description="memory measurement of a build that measures; null for none"
    )
    verify: VerifyRecipeOptions | None = Field(
        default=None, description="verification of the runtime's features; null for none, a gate on it needs no section"
    )
    generate: GenerateOptions | None = Field(default=None, description="sample text; null for none")
    gates: Mapping[str, GateLimit] = Field(
        default_factory=dict, description="limits by metric; an artifact that breaks one is rejected"
    )
    seed: WholeNumber = Field(
        default=0, ge=0, le=MOST_SEED, description="seed of everything random in build and measurement"
    )
    threads: Threads | None = Field(default=None, description="compute threads; null: INGOT_THREADS or all cores")

    _places: _Places = PrivateAttr(default=_Places())

    def with_places(self, located: Located) -> Self:
        """Return the recipe with the places of its keys, for messages; equal to this one."""
        placed = self.model_copy()
        placed._places = _Places(located)
        return placed

    def problem(self, key: str, message: str) -> Problem:
        """A mistake at the key, such as evaluation.text, or at the nearest key around it in the recipe."""
        root = self._places.root
        place = root.at(tuple(key.split("."))) if root else None
        if root is None or place is root:
            return Problem(f"recipe {self.name}" if root is None else root.file, 0, message)
        assert place is not None
        return place.problem(message)

    def sets(self, key: str) -> bool:
        """Return whether the key, such as evaluation.window_tokens, was given and is not a default."""
        place = self._places.root
        for part in key.split("."):
            place = place.entries.get(part) if place else None
        return place is not None

    @property
    def is_measured(self) -> bool:
        """Return whether the build measures the artifact."""
        return bool(self.evaluation or self.latency or self.verify) or not all(
            gate.if_measured for gate in self.gates.values()
        )

    @property
    def applied_gates(self) -> dict[str, GateLimit]:
        """The gates whose metrics are measured; all others are `if_measured`."""
        levels = {f"@{level}" for level in self.latency.concurrency} if self.latency else set()
        found = {}
        for metric, gate in self.gates.items():
            name, separator, level = metric.partition("@")
            section = METRICS[name].section
            has_section = self.is_measured if section is None else getattr(self, section) is not None
            if not gate.if_measured or (has_section and (not separator or separator + level in levels)):
                found[metric] = gate
        return found

    @property
    def has_required_gates(self) -> bool:
        """Return whether a gate decides about the artifact; advisory ones do not."""
        return any(not gate.advisory for gate in self.applied_gates.values())

    @property
    def output_folder(self) -> Path:
        """The artifact's folder, relative to the working folder."""
        return Path(self.output).expanduser() if self.output else Path("artifacts") / self.name

    def require_checkpoint(self) -> Path:
        """The checkpoint's folder or GGUF file. UsageError when the recipe names none, or it does not exist."""
        advice = (
            "set it with --set checkpoint=FOLDER_OR_GGUF, for `ingot build` also as the argument after the recipe "
            "(or `checkpoint:` in a recipe that extends this one)"
        )
        if self.checkpoint is None:
            raise PathError(self.name, "checkpoint", f"names no checkpoint; {advice}")
        path = self.checkpoint.path
        if not os.path.isdir(path) and not (path.suffix == ".gguf" and os.path.isfile(path)):
            problem = source_only(path) or f"is not a folder or GGUF file (looked for {shown_path(path)})"
            given = shown(self.checkpoint.given, LONGEST_PATH)
            raise PathError(self.name, "checkpoint", f"checkpoint {given} {problem}; {advice}")
        return path

    def require_checkpoint_folder(self) -> Path:
        """The folder of the checkpoint's files: the checkpoint itself, or the parent of the GGUF file."""
        path = self.require_checkpoint()
        return path.parent if path.is_file() else path

    def evaluation_text(self) -> Path | None:
        """The evaluation text's file; None without an evaluation. UsageError when it does not exist."""
        if self.evaluation is None:
            return None
        advice = "or --set evaluation=null to build without measuring accuracy"
        return self._text("evaluation.text", self.evaluation.text, advice)

    def calibration_text(self) -> Path:
        """The calibration text's file or folder. UsageError when the recipe names none, or it does not exist."""
        text = self.calibration.text if self.calibration else None
        advice = "or remove the calibrated passes"
        if text is None:
            message = f"names no calibration text; set it with --set calibration.text=FILE, {advice}"
            raise PathError(self.name, "calibration.text", message)
        return self._text("calibration.text", text, advice, folder=True)

    def _text(self, key: str, text: RecipePath, advice: str, folder: bool = False) -> Path:
        """The file (or folder) under a key, which may be in the checkpoint's folder."""
        path = text.path
        if text.given.startswith(IN_CHECKPOINT):
            path = self.require_checkpoint_folder() / text.given.removeprefix(IN_CHECKPOINT)
        if not os.path.isfile(path) and not (folder and os.path.isdir(path)):
            raise PathError(
                self.name,
                key,
                f"{key} {shown(text.given, LONGEST_PATH)} is not a file{' or folder' if folder else ''} "
                f"(looked for {shown_path(path)}); "
                f"set it with --set {key}=FILE, {advice}",
            )
        return path

    def adapter_folder(self) -> Path | None:
        """The folder of the adapter; None without one. UsageError when it does not exist."""
        if self.adapter is None:
            return None
        if not os.path.isdir(self.adapter.path):
            raise PathError(
                self.name,
                "adapter",
                f"adapter {shown(self.adapter.given, LONGEST_PATH)} is not a folder (looked for "
                f"{shown_path(self.adapter.path)}); set it with --set adapter=FOLDER, or remove the key to build the "
                "checkpoint alone",
            )
        return self.adapter.path

    def chat_template_file(self) -> Path | None:
        """The file of the chat template; None without one. UsageError when it does not exist."""
        advice = "or remove the key to keep the checkpoint's own template"
        return self._text("chat_template", self.chat_template, advice) if self.chat_template else None

    def tile_table(self) -> Path | None:
        """The tile table's file; None without one. UsageError when it does not exist."""
        advice = "create one with `ingot tune`, or remove the key"
        return self._text("gpu.tiles", self.gpu.tiles, advice) if self.gpu.tiles else None

    def make_passes(self) -> list[Pass]:
        """The passes, in order."""
        return [entry.make() for entry in self.passes]

    def for_engine(self, engine: EngineKind) -> Self:
        """The recipe with `cpu.engine` resolved to the engine of an artifact; unchanged where that is of a GPU."""
        if engine not in CPU_ENGINES:
            return self
        return self.model_copy(update={"cpu": CpuOptions.model_validate({"engine": engine})})

    def baseline(self) -> "Recipe":
        """The recipe of the baseline: without quantization, and without keys that do not affect the program.

        Recipes that differ only in quantization and measurement share one baseline.
        """
        return Recipe(
            name="baseline",
            checkpoint=self.checkpoint,
            adapter=self.adapter,
            target=self.target,
            context_tokens=self.context_tokens,
            passes=tuple(entry for entry in self.passes if not entry.make().is_lossy),
            engine=self.engine,
            cpu=self.cpu,
            gpu=self.gpu,
            threads=self.threads,
        )

    def resolved_yaml(self, *, with_serving: bool = False) -> str:
        """The recipe with every default filled in, as YAML that is the same on any machine.

        The artifact's identity covers this text, so what does not change the answers is left out: the folders of
        checkpoint and texts, which are given by name, `output`, and `serving`, which is in the manifest.
        """
        data = self.model_dump(mode="json", exclude={"output", "passes"} | (set() if with_serving else {"serving"}))
        if self.checkpoint is not None:
            data["checkpoint"] = self.checkpoint.path.name
        if self.adapter is not None:
            data["adapter"] = self.adapter.path.name
        for key, section in (("evaluation", self.evaluation), ("calibration", self.calibration)):
            text = section.text if section else None
            if text is not None and not text.given.startswith(IN_CHECKPOINT):
                data[key]["text"] = text.path.name
        if self.chat_template is not None:
            data["chat_template"] = TEMPLATE_FILE  # the artifact keeps it
        if self.gpu.tiles is not None:
            data["gpu"]["tiles"] = TILES_FILE  # the artifact keeps the table
        # Identities of artifacts from before there were these options stay.
        if self.cpu.mtp:
            del data["cpu"]["mtp"]
        if self.calibration and self.calibration.count_experts:
            del data["calibration"]["count_experts"]
        if self.stream_experts == AUTO:
            del data["stream_experts"]
        if self.place is None:
            del data["devices"], data["place"]
        else:
            data["devices"] = [
                {key: size for key, size in each.items() if size is not None} for each in data["devices"]
            ]
        if self.latency and self.latency.slo:
            data["latency"]["slo"] = {key: limit for key, limit in data["latency"]["slo"].items() if limit is not None}
        data["gates"] = {metric: gate.model_dump(exclude_defaults=True) for metric, gate in self.gates.items()}
        data["passes"] = [_pass_as_data(entry.make()) for entry in self.passes]
        ordered = {key: data[key] for key in Recipe.model_fields if key in data}
        return yaml.safe_dump(ordered, sort_keys=False, allow_unicode=True, width=float("inf"))


def _pass_as_data(made: Pass) -> object:
    return {made.name: made.options()} if made.options() else made.name
