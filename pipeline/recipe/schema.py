"""A recipe: what to build and what must hold. Frozen, validated, with every default filled in.

`recipe_loader.load_recipe` makes one from YAML; docs/recipes.md explains every key. To add a key: its field here with
a description, its line in docs/recipes.md, and whoever reads it.

The recipe's section `gpu`: what a program for a card is made for. Targets without a card do not read it.

Paths as recipes give them: relative to the file that they stand in.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, field_validator, model_validator

from ingot.artifact.launch_program import TILES_FILE
from ingot.errors import UsageError
from ingot.passes.base import Pass
from ingot.passes.registry import make_pass


@dataclass(frozen=True)
class RecipePath:
    """A path as the recipe gives it, and the folder that it is relative to."""

    given: str
    folder: Path

    def __str__(self) -> str:
        return self.given

    @property
    def path(self) -> Path:
        """Where it points; `~` is the home folder."""
        return Path(os.path.normpath(self.folder / Path(self.given).expanduser()))


GivenPath = Annotated[RecipePath, PlainSerializer(str, return_type=str)]


Rows = Annotated[int, Field(ge=1)]
_LEAST_RAGGED = 32
_STEP = 4


class GpuOptions(BaseModel):
    """Activations, the numbers of rows that programs are made for, and the choice of tiles."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    activations: Literal["checkpoint", "float16", "bfloat16", "float32"] = Field(
        default="checkpoint",
        description="type that is computed in; checkpoint: its own where that has 16 bits, else float16",
    )
    decode_rows: tuple[Rows, ...] = Field(
        default=(1, 2, 4, 8, 16, 32, 64),
        min_length=1,
        description="programs for steps of one token a sequence; the largest is the most sequences at a time",
    )
    prefill_rows: tuple[Rows, ...] | None = Field(
        default=None,
        min_length=1,
        description="programs for other steps, by tokens; null: 32, 128, ... up to engine.max_batch_tokens",
    )
    sms: tuple[int, ...] = Field(
        default=(), description="cards that a target with a choice builds for, as [86, 89, 120]"
    )
    tiles: GivenPath | None = Field(default=None, description="table of tiles that `ingot tune` measured on a card")

    @field_validator("decode_rows", "prefill_rows", "sms")
    @classmethod
    def _ascending(cls, values: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if values is not None and list(values) != sorted(set(values)):
            raise ValueError(f"{list(values)} must ascend, and name each value once")
        return values

    def ragged_rows(self, max_batch_tokens: int) -> tuple[int, ...]:
        """Rows of the programs for other steps than plain decoding; the last holds a whole step."""
        given = self.prefill_rows
        if given is None:
            rows, given = _LEAST_RAGGED, ()
            while rows < max_batch_tokens:
                given, rows = (*given, rows), rows * _STEP
        return (*(rows for rows in given if rows < max_batch_tokens), max_batch_tokens)


IN_CHECKPOINT = "checkpoint:"


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class PassEntry(_Frozen):
    """One pass of the list, by name, with the options that the recipe sets."""

    name: str
    options: Mapping[str, object] = Field(default_factory=dict)

    def make(self) -> Pass:
        """The pass itself."""
        return make_pass(self.name, self.options)


class EngineOptions(_Frozen):
    """Sizes that the runtime is built for."""

    max_batch_tokens: int = Field(default=512, ge=1, description="most tokens of one engine step")
    block_tokens: int = Field(default=16, ge=1, description="tokens of one KV block")


class EvaluationOptions(_Frozen):
    """The text that accuracy is measured on."""

    text: GivenPath = Field(
        description="text file, relative to this recipe; `checkpoint:FILE` is a file in the checkpoint's folder"
    )
    tokens: int = Field(default=61_440, ge=2, description="tokens to predict, rounded down to whole windows")
    window_tokens: int = Field(default=512, ge=1, description="tokens of context and of prediction per window")
    layer_kl_tokens: int | None = Field(
        default=None, ge=0, description="tokens for the KL of each weight quantized alone; 0: none, null: 2048 or fewer"
    )

    @model_validator(mode="after")
    def _at_least_two_windows(self) -> Self:
        least = 2 * self.window_tokens
        if self.tokens < least:
            raise ValueError(
                f"tokens is {self.tokens}; it must be at least two windows ({least}): raise it, or lower window_tokens"
            )
        return self


class CalibrationOptions(_Frozen):
    """The data that passes such as gptq look at."""

    text: GivenPath | None = Field(
        default=None,
        description="text file, JSONL file or folder, given as `evaluation.text` is, and another one than that",
    )
    field: str | None = Field(
        default=None, min_length=1, description="key of a JSONL record; null: text, messages, or prompt and completion"
    )
    chat_template: bool = Field(default=False, description="render messages by the checkpoint's chat template")
    packing: Literal["packed", "documents"] = Field(
        default="packed",
        description="packed: documents end to end in sequences of one length; documents: each a sequence of its own",
    )
    sequences: int = Field(default=64, ge=1, description="sequences drawn from the text, without overlap")
    sequence_tokens: int = Field(default=256, ge=2, description="tokens of each, or the most for `documents`")
    seed: int = Field(default=0, ge=0, description="seed of the draw")


class ServiceLevelOptions(_Frozen):
    """The objective behind goodput: a request counts when both hold."""

    ttft_seconds: float = Field(gt=0, description="longest time to first token that counts")
    tpot_seconds: float = Field(gt=0, description="longest time per output token that counts")


class LatencyOptions(_Frozen):
    """The load that latency is measured under, baseline and candidate interleaved."""

    concurrency: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(1, 4), min_length=1, description="levels: requests kept in flight"
    )
    prompt_tokens: int = Field(default=128, ge=1, description="tokens of each prompt")
    output_tokens: int = Field(default=64, ge=2, description="tokens of each output")
    requests: int = Field(default=8, ge=1, description="requests per run")
    rounds: int = Field(default=5, ge=2, description="pairs of runs per level")
    slo: ServiceLevelOptions | None = Field(default=None, description="objective for goodput; null for none")

    @field_validator("concurrency")
    @classmethod
    def _levels_differ(cls, levels: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(levels)) < len(levels):
            raise ValueError(f"concurrency {list(levels)} names a level twice: take one out")
        return levels


class GenerateOptions(_Frozen):
    """A sample text, shown at the end of the build."""

    prompt: str = Field(min_length=1, description="text to continue")
    max_tokens: int = Field(default=64, ge=1, description="most tokens to generate")
    temperature: float = Field(default=0.0, ge=0, description="0 is greedy; else draws are seeded by `seed`")


class GateLimit(_Frozen):
    """The limit of one gate: `max` where lower is better, `min` where higher is."""

    max: float | None = Field(default=None, description="the measured value must not be above")
    min: float | None = Field(default=None, description="the measured value must not be below")

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.max is None) == (self.min is None):
            raise ValueError("a gate has exactly one limit: write {max: NUMBER} or {min: NUMBER}")
        return self

    @property
    def bound(self) -> Literal["max", "min"]:
        """Which side is limited."""
        return "max" if self.max is not None else "min"

    @property
    def limit(self) -> float:
        """The limit's value."""
        value = self.max if self.max is not None else self.min
        assert value is not None
        return value


class Recipe(_Frozen):
    """What to build, from which checkpoint, how to measure it, and what must hold."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="name of recipe and artifact; default: the file's name"
    )
    description: str = Field(default="", description="one sentence for `ingot recipes`")
    checkpoint: GivenPath | None = Field(default=None, description="checkpoint folder, relative to this recipe")
    target: str = Field(default="cpu", description="what to build for")
    context_tokens: int | None = Field(default=None, ge=1, description="longest sequence; null takes the model's own")
    output: str | None = Field(default=None, min_length=1, description="artifact folder; null is artifacts/NAME")
    passes: tuple[PassEntry, ...] = Field(
        default=(), description="passes in order, each a name or {name: {option: value}}"
    )
    engine: EngineOptions = Field(default=EngineOptions(), description="sizes that the runtime is built for")
    gpu: GpuOptions = Field(default=GpuOptions(), description="what a program for a card is made for")
    calibration: CalibrationOptions | None = Field(default=None, description="data for passes that ask for it")
    evaluation: EvaluationOptions | None = Field(default=None, description="accuracy measurement; null for none")
    latency: LatencyOptions | None = Field(default=None, description="latency measurement; null for none")
    generate: GenerateOptions | None = Field(default=None, description="sample text; null for none")
    gates: Mapping[str, GateLimit] = Field(
        default_factory=dict, description="limits by metric; an artifact that breaks one is not made"
    )
    seed: int = Field(default=0, ge=0, description="seed of everything random in build and measurement")
    threads: int | None = Field(
        default=None, ge=1, description="threads to compute with; null takes INGOT_THREADS or all cores"
    )

    @property
    def output_folder(self) -> Path:
        """Where the artifact goes, relative to the working folder."""
        return Path(self.output).expanduser() if self.output else Path("artifacts") / self.name

    def require_checkpoint(self) -> Path:
        """The checkpoint's folder or GGUF file. UsageError when the recipe names none, or it is not there."""
        advice = "set it with --set checkpoint=FOLDER_OR_GGUF (or `checkpoint:` in a recipe that extends this one)"
        if self.checkpoint is None:
            raise UsageError(f"recipe {self.name} names no checkpoint; {advice}")
        path = self.checkpoint.path
        if not path.is_dir() and not (path.suffix == ".gguf" and path.is_file()):
            raise UsageError(
                f"recipe {self.name}: checkpoint {self.checkpoint.given!r} is no folder "
                f"(looked for {self.checkpoint.path}); {advice}"
            )
        return self.checkpoint.path

    def require_checkpoint_folder(self) -> Path:
        """Where the checkpoint's other files are: the folder itself, or the one that the GGUF file lies in."""
        path = self.require_checkpoint()
        return path.parent if path.is_file() else path

    def evaluation_text(self) -> Path | None:
        """The evaluation text's file; None without an evaluation. UsageError when it is not there."""
        if self.evaluation is None:
            return None
        advice = "or --set evaluation=null to build without measuring accuracy"
        return self._text("evaluation.text", self.evaluation.text, advice)

    def calibration_text(self) -> Path:
        """The calibration text's file or folder. UsageError when the recipe names none, or it is not there."""
        text = self.calibration.text if self.calibration else None
        advice = "or leave the calibrated passes out"
        if text is None:
            raise UsageError(
                f"recipe {self.name} names no calibration text; set it with --set calibration.text=FILE, {advice}"
            )
        return self._text("calibration.text", text, advice, folder=True)

    def _text(self, key: str, text: RecipePath, advice: str, folder: bool = False) -> Path:
        """The file (or folder) of a text, which may lie in the checkpoint's folder."""
        path = text.path
        if text.given.startswith(IN_CHECKPOINT):
            path = self.require_checkpoint_folder() / text.given.removeprefix(IN_CHECKPOINT)
        if not path.is_file() and not (folder and path.is_dir()):
            raise UsageError(
                f"recipe {self.name}: {key} {text.given!r} is no file{' or folder' if folder else ''} "
                f"(looked for {path}); set it with --set {key}=FILE, {advice}"
            )
        return path

    def tile_table(self) -> Path | None:
        """The table of tiles; None where the recipe names none. UsageError when it is not there."""
        advice = "make one with `ingot tune`, or leave it out"
        return self._text("gpu.tiles", self.gpu.tiles, advice) if self.gpu.tiles else None

    def make_passes(self) -> list[Pass]:
        """The passes, in order."""
        return [entry.make() for entry in self.passes]

    def baseline(self) -> "Recipe":
        """What the candidate is compared with: no quantization, and nothing that does not shape the program.

        Recipes that differ in quantization and measurement alone so have one and the same baseline.
        """
        return Recipe(
            name="baseline",
            checkpoint=self.checkpoint,
            target=self.target,
            context_tokens=self.context_tokens,
            passes=tuple(entry for entry in self.passes if not entry.make().is_lossy),
            engine=self.engine,
            gpu=self.gpu,
            threads=self.threads,
        )

    def resolved_yaml(self) -> str:
        """The recipe with every default filled in, as YAML that is the same on any machine.

        Checkpoint and text stand by name, without their folders, and `output` is left out: neither changes what is
        built, and the artifact's identity covers this text.
        """
        data = self.model_dump(mode="json", exclude={"output", "passes"})
        if self.checkpoint is not None:
            data["checkpoint"] = self.checkpoint.path.name
        for key, section in (("evaluation", self.evaluation), ("calibration", self.calibration)):
            text = section.text if section else None
            if text is not None and not text.given.startswith(IN_CHECKPOINT):
                data[key]["text"] = text.path.name
        if self.gpu.tiles is not None:
            data["gpu"]["tiles"] = TILES_FILE  # the artifact keeps the table
        data["gates"] = {metric: {gate.bound: gate.limit} for metric, gate in self.gates.items()}
        data["passes"] = [_pass_as_data(entry.make()) for entry in self.passes]
        ordered = {key: data[key] for key in Recipe.model_fields if key in data}
        return yaml.safe_dump(ordered, sort_keys=False, allow_unicode=True, width=float("inf"))


def _pass_as_data(made: Pass) -> object:
    return {made.name: made.options()} if made.options() else made.name
