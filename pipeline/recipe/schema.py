"""The schema of a recipe: what to build and what must hold. Frozen, validated, with every default filled in.

load.py makes a Recipe from YAML; docs/recipes.md documents every key. To add a key: its field here with a description,
its line in docs/recipes.md, and the code that reads it.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, Self

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PrivateAttr,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from ingot.artifact.launch_program import TILES_FILE
from ingot.artifact.metrics import METRICS
from ingot.errors import LONGEST_PATH, Problem, UsageError, shown, shown_path
from ingot.passes.base import Pass
from ingot.passes.registry import make_pass
from ingot.pipeline.recipe.shipped import source_only
from ingot.pipeline.recipe.yaml import Located
from ingot.settings import MAX_THREADS


@dataclass(frozen=True)
class RecipePath:
    """A path as the recipe gives it, and the folder that it is relative to."""

    given: str
    folder: Path

    def __str__(self) -> str:
        return self.given

    @property
    def path(self) -> Path:
        """The path, normalized; `~` is the home folder."""
        return Path(os.path.normpath(self.folder / Path(self.given).expanduser()))


def _whole(value: object) -> object:
    """A float without a fraction, such as 1e4, as the integer that it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


GivenPath = Annotated[RecipePath, PlainSerializer(str, return_type=str), WithJsonSchema({"type": "string"})]
WholeNumber = Annotated[int, BeforeValidator(_whole)]
# Upper bounds are far above what is useful; they exist so that a slip is refused before it fills a disk or a memory.
MOST_TOKENS = 1 << 24  # of a context
MOST_STEP_TOKENS = 1 << 20  # the runtime's own limit
MOST_TEXT_TOKENS = 1_000_000_000
MOST_SECONDS = 86_400
MOST_SEED = (1 << 63) - 1
MOST_PASSES = 100
Rows = Annotated[int, Field(ge=1, le=MOST_STEP_TOKENS), BeforeValidator(_whole)]
ContextTokens = Annotated[int, Field(ge=1, le=MOST_TOKENS), BeforeValidator(_whole)]
Generations = Annotated[int, Field(ge=0, le=MOST_TOKENS), BeforeValidator(_whole)]
TextTokens = Annotated[int, Field(ge=0, le=MOST_TEXT_TOKENS), BeforeValidator(_whole)]
Concurrency = Annotated[int, Field(ge=1, le=4096), BeforeValidator(_whole)]
Threads = Annotated[int, Field(ge=1, le=MAX_THREADS), BeforeValidator(_whole)]

TEMPLATE_FILE = "tokenizer/chat_template.jinja"  # in an artifact
IN_CHECKPOINT = "checkpoint:"  # prefix of a text in the checkpoint's folder
_LEAST_RAGGED_ROWS = 32
_RAGGED_STEP = 4


@dataclass(frozen=True)
class Places:
    """Where the keys of a recipe are written; None for a recipe made in Python. Recipes are equal wherever they are."""

    root: Located | None = field(default=None, compare=False)


class PathError(UsageError):
    """A path of a recipe that is missing: the key, and the message without the recipe's name."""

    def __init__(self, recipe: str, key: str, message: str) -> None:
        super().__init__(f"recipe {recipe}{'' if message.startswith('names no ') else ':'} {message}")
        self.key = key
        self.message = message


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class GpuOptions(_Frozen):
    """Options of programs for GPUs. CPU targets ignore them."""

    activations: Literal["checkpoint", "float16", "bfloat16", "float32"] = Field(
        default="checkpoint",
        description="compute type; checkpoint: the checkpoint's type if it has 16 bits, else float16",
    )
    decode_rows: tuple[Rows, ...] = Field(
        default=(1, 2, 4, 8, 16, 32, 64),
        min_length=1,
        max_length=64,
        description="batch sizes of the decode programs; the largest is the maximum number of concurrent sequences",
    )
    prefill_rows: tuple[Rows, ...] | None = Field(
        default=None,
        min_length=1,
        max_length=64,
        description="token counts of the programs for other steps; null: 32, 128, ... up to engine.max_batch_tokens",
    )
    sms: tuple[WholeNumber, ...] = Field(
        default=(),
        max_length=64,
        description="GPUs to build for, by SM number such as [86, 89, 120], if the target offers a choice",
    )
    tiles: GivenPath | None = Field(default=None, description="tile table measured on a GPU by `ingot tune`")

    @field_validator("decode_rows", "prefill_rows", "sms")
    @classmethod
    def _ascending(cls, values: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if values is not None and list(values) != sorted(set(values)):
            raise ValueError(f"{list(values)} must be in ascending order without duplicates")
        return values

    def ragged_rows(self, max_batch_tokens: int) -> tuple[int, ...]:
        """Token counts of the programs for steps with prefill; the last one fits a whole step."""
        given = self.prefill_rows
        if given is None:
            rows, given = _LEAST_RAGGED_ROWS, ()
            while rows < max_batch_tokens:
                given, rows = (*given, rows), rows * _RAGGED_STEP
        return (*(rows for rows in given if rows < max_batch_tokens), max_batch_tokens)


class PassEntry(_Frozen):
    """One pass of the list: its name and the options that the recipe sets."""

    name: str
    options: Mapping[str, object] = Field(default_factory=dict)

    def make(self) -> Pass:
        """Construct the pass."""
        return make_pass(self.name, self.options)


class EngineOptions(_Frozen):
    """Sizes that the runtime is built for."""

    max_batch_tokens: WholeNumber = Field(
        default=512, ge=1, le=MOST_STEP_TOKENS, description="maximum tokens per engine step"
    )
    block_tokens: WholeNumber = Field(default=16, ge=1, le=1024, description="tokens per KV block")


class EvaluationOptions(_Frozen):
    """The text on which accuracy is measured."""

    text: GivenPath = Field(
        description="text file, relative to this recipe; `checkpoint:FILE` is a file in the checkpoint's folder"
    )
    tokens: WholeNumber = Field(
        default=61_440, ge=2, le=MOST_TEXT_TOKENS, description="tokens to predict, rounded down to whole windows"
    )
    window_tokens: ContextTokens = Field(default=512, description="context tokens and predicted tokens per window")
    layer_kl_tokens: TextTokens | None = Field(
        default=None,
        description="tokens for the KL of each weight quantized alone; 0: not measured, null: at most 2048",
    )
    generations: Generations | None = Field(
        default=None,
        description="prompts that both continue greedily; 0: none, null: 16 if a pass rounds keys and values",
    )
    generation_tokens: ContextTokens = Field(
        default=512, description="tokens that each of these prompts is continued by, up to the context's end"
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
    """Data for calibrated passes such as gptq."""

    text: GivenPath | None = Field(
        default=None,
        description="text file, JSONL file or folder, written like `evaluation.text`; must not be the evaluation text",
    )
    field: str | None = Field(
        default=None, min_length=1, description="key of a JSONL record; null: text, messages, or prompt and completion"
    )
    chat_template: bool = Field(default=False, description="render messages with the checkpoint's chat template")
    packing: Literal["packed", "documents"] = Field(
        default="packed",
        description="packed: documents end to end in sequences of one length; documents: one sequence per document",
    )
    sequences: WholeNumber = Field(
        default=64, ge=1, le=1_000_000, description="sequences drawn from the text, without overlap"
    )
    sequence_tokens: WholeNumber = Field(
        default=256, ge=2, le=MOST_TOKENS, description="tokens per sequence; the maximum for `documents`"
    )
    seed: WholeNumber = Field(default=0, ge=0, le=MOST_SEED, description="seed of the random choice of sequences")


class ServiceLevelOptions(_Frozen):
    """The service-level objective for goodput: a request counts when both limits hold."""

    ttft_seconds: float = Field(gt=0, le=MOST_SECONDS, description="maximum time to first token")
    tpot_seconds: float = Field(gt=0, le=MOST_SECONDS, description="maximum time per output token")


class LatencyOptions(_Frozen):
    """The load under which latency is measured, baseline and candidate interleaved."""

    concurrency: tuple[Concurrency, ...] = Field(
        default=(1, 4),
        min_length=1,
        max_length=16,
        description="numbers of requests kept in flight, each measured on its own",
    )
    prompt_tokens: ContextTokens = Field(default=128, description="tokens per prompt")
    output_tokens: WholeNumber = Field(default=64, ge=2, le=MOST_TOKENS, description="tokens per output")
    requests: WholeNumber = Field(default=8, ge=1, le=100_000, description="requests per run")
    rounds: WholeNumber = Field(
        default=5, ge=2, le=10_000, description="least number of pairs of runs (baseline, candidate)"
    )
    max_seconds: float = Field(
        default=300.0,
        gt=0,
        le=MOST_SECONDS,
        description="time after which no more rounds are added to decide the gates on latency",
    )
    slo: ServiceLevelOptions | None = Field(default=None, description="objective for goodput; null for none")

    @field_validator("concurrency")
    @classmethod
    def _levels_differ(cls, levels: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(levels)) < len(levels):
            raise ValueError(f"concurrency {list(levels)} repeats a level; remove it")
        return levels


class MemoryOptions(_Frozen):
    """How peak memory is measured: processes that load the artifact or the baseline and generate once."""

    probes: WholeNumber = Field(default=3, ge=2, le=100, description="processes per engine, baseline and candidate")
    prompt_tokens: ContextTokens = Field(default=64, description="tokens of the prompt in each")
    output_tokens: ContextTokens = Field(default=16, description="tokens of the output in each")


class VerifyRecipeOptions(_Frozen):
    """How the features of the runtime are verified against the plain path; see `ingot verify`."""

    quick: bool = Field(
        default=True, description="fewer requests with shorter outputs and no triples: under a minute for a small model"
    )


class GenerateOptions(_Frozen):
    """A sample text, shown at the end of the build."""

    prompt: str = Field(min_length=1, description="text to continue")
    max_tokens: ContextTokens = Field(default=64, description="maximum tokens to generate")
    temperature: float = Field(
        default=0.0, ge=0, le=100, description="0 is greedy; otherwise sampling is seeded by `seed`"
    )


class GateLimit(_Frozen):
    """The limit of one gate: `max` where lower is better, `min` where higher is; and what it decides."""

    max: float | None = Field(default=None, description="the measured value must not be above this")
    min: float | None = Field(default=None, description="the measured value must not be below this")
    advisory: bool = Field(default=False, description="report the verdict, but seal the artifact whatever it is")
    if_measured: bool = Field(
        default=False, description="leave the gate out where the recipe does not measure its metric, do not refuse it"
    )

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.max is None) == (self.min is None):
            raise ValueError("a gate has exactly one limit: write {max: NUMBER} or {min: NUMBER}")
        return self

    @property
    def bound(self) -> Literal["max", "min"]:
        """The kind of limit."""
        return "max" if self.max is not None else "min"

    @property
    def limit(self) -> float:
        """The value of the limit."""
        value = self.max if self.max is not None else self.min
        assert value is not None
        return value


class Recipe(_Frozen):
    """What to build, from which checkpoint, how to measure it, and what must hold."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        max_length=128,
        description="name of recipe and artifact; default: the file's name",
    )
    description: str = Field(default="", description="one sentence for `ingot recipes`")
    checkpoint: GivenPath | None = Field(default=None, description="checkpoint folder, relative to this recipe")
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
    engine: EngineOptions = Field(default=EngineOptions(), description="sizes that the runtime is built for")
    gpu: GpuOptions = Field(default=GpuOptions(), description="options of programs for GPUs")
    calibration: CalibrationOptions | None = Field(
        default=None, description="data for calibrated passes; null for none"
    )
    evaluation: EvaluationOptions | None = Field(default=None, description="accuracy measurement; null for none")
    latency: LatencyOptions | None = Field(default=None, description="latency measurement; null for none")
    memory: MemoryOptions | None = Field(
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

    _places: Places = PrivateAttr(default=Places())

    def with_places(self, located: Located) -> Self:
        """Return the recipe with the places of its keys, for messages; equal to this one."""
        placed = self.model_copy()
        placed._places = Places(located)
        return placed

    def problem(self, key: str, message: str) -> Problem:
        """A mistake at the key, such as evaluation.text, or at the nearest one around it that the recipe has."""
        root = self._places.root
        place = root.at(tuple(key.split("."))) if root else None
        if root is None or place is root:
            return Problem(f"recipe {self.name}" if root is None else root.file, 0, message)
        assert place is not None
        return place.problem(message)

    def sets(self, key: str) -> bool:
        """Whether the key, such as evaluation.window_tokens, was given and is not a default."""
        section: object = self
        for part in key.split("."):
            if not isinstance(section, BaseModel) or part not in section.model_fields_set:
                return False
            section = getattr(section, part)
        return True

    @property
    def is_measured(self) -> bool:
        """Whether the build measures the artifact."""
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
    def output_folder(self) -> Path:
        """The artifact's folder, relative to the working folder."""
        return Path(self.output).expanduser() if self.output else Path("artifacts") / self.name

    def require_checkpoint(self) -> Path:
        """The checkpoint's folder or GGUF file. UsageError when the recipe names none, or it does not exist."""
        advice = "set it with --set checkpoint=FOLDER_OR_GGUF (or `checkpoint:` in a recipe that extends this one)"
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

    def baseline(self) -> "Recipe":
        """The recipe of the baseline: without quantization, and without keys that do not affect the program.

        Recipes that differ only in quantization and measurement share one baseline.
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

        Checkpoint and texts are given by name, without their folders, and `output` is left out: neither changes what
        is built, and the artifact's identity covers this text.
        """
        data = self.model_dump(mode="json", exclude={"output", "passes"})
        if self.checkpoint is not None:
            data["checkpoint"] = self.checkpoint.path.name
        for key, section in (("evaluation", self.evaluation), ("calibration", self.calibration)):
            text = section.text if section else None
            if text is not None and not text.given.startswith(IN_CHECKPOINT):
                data[key]["text"] = text.path.name
        if self.chat_template is not None:
            data["chat_template"] = TEMPLATE_FILE  # the artifact keeps it
        if self.gpu.tiles is not None:
            data["gpu"]["tiles"] = TILES_FILE  # the artifact keeps the table
        data["gates"] = {metric: gate.model_dump(exclude_defaults=True) for metric, gate in self.gates.items()}
        data["passes"] = [_pass_as_data(entry.make()) for entry in self.passes]
        ordered = {key: data[key] for key in Recipe.model_fields if key in data}
        return yaml.safe_dump(ordered, sort_keys=False, allow_unicode=True, width=float("inf"))


def _pass_as_data(made: Pass) -> object:
    return {made.name: made.options()} if made.options() else made.name
