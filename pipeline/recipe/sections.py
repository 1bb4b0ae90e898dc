"""The sections of a recipe, a class each, the entries of its lists, and the types of their values."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal, Self, TypeAlias

from pydantic import BeforeValidator, Field, PlainSerializer, WithJsonSchema, field_validator, model_validator

from ingot.artifact.programs.cpu_program import Arithmetic
from ingot.artifact.section import Section, as_bytes, as_whole, bytes_schema, section_of
from ingot.artifact.serving import MOST_STEP_TOKENS
from ingot.errors import one_of, shown
from ingot.options import MOST_BYTES
from ingot.passes.base import Pass
from ingot.passes.registry import make_pass
from ingot.settings import MAX_THREADS
from ingot.validation.options import (
    MIN_WINDOWS,
    MOST_TOKENS,
    AccuracyOptions,
    GenerationOptions,
    LatencyLoad,
    MemoryOptions,
)


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


GivenPath = Annotated[RecipePath, PlainSerializer(str, return_type=str), WithJsonSchema({"type": "string"})]
WholeNumber = Annotated[int, BeforeValidator(as_whole)]
MOST_TEXT_TOKENS = 1_000_000_000
MOST_SEED = (1 << 63) - 1
Rows = Annotated[int, Field(ge=1, le=MOST_STEP_TOKENS), BeforeValidator(as_whole)]
ContextTokens = Annotated[int, Field(ge=1, le=MOST_TOKENS), BeforeValidator(as_whole)]
Generations = Annotated[int, Field(ge=0, le=MOST_TOKENS), BeforeValidator(as_whole)]
TextTokens = Annotated[int, Field(ge=0, le=MOST_TEXT_TOKENS), BeforeValidator(as_whole)]
ByteSize = Annotated[
    int, Field(ge=1, le=MOST_BYTES), BeforeValidator(as_bytes), WithJsonSchema(bytes_schema(1, MOST_BYTES))
]
Threads = Annotated[int, Field(ge=1, le=MAX_THREADS), BeforeValidator(as_whole)]

_LEAST_RAGGED_ROWS = 32
_MOST_PATTERNS = 1000
_RAGGED_STEP = 4


class GpuOptions(Section):
    """Options of programs for GPUs. CPU targets ignore them."""

    activations: Literal["checkpoint", "float16", "bfloat16", "float32"] = Field(
        default="checkpoint",
        description="compute type; checkpoint: the checkpoint's type if it has 16 bits, else float16",
    )
    adapters: bool = Field(
        default=False,
        description="also build programs for steps in which requests have LoRA adapters (docs/lora.md)",
    )
    batch_invariant: bool = Field(
        default=False,
        description="compute a row's logits with the same bits in every batch, at some cost in speed",
    )
    decode_rows: tuple[Rows, ...] = Field(
        default=(1, 2, 4, 8, 16, 32, 64),
        min_length=1,
        max_length=64,
        description="batch sizes of the decode programs; the largest is the maximum number of concurrent sequences",
    )
    dependent_launches: bool = Field(
        default=False,
        description="let a kernel start before the one before it ends, on SM 90 and newer; not measured yet",
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
    specialized_attention: bool = Field(
        default=True,
        description="on SM 90, attention of prompts by warps that copy and warps that compute, where there is such a "
        "kernel; not measured yet",
    )
    specialized_matmuls: bool = Field(
        default=True,
        description="on SM 90, matmuls of 9 to 256 rows by a weight of 4 bits by warps that copy and warps that "
        "multiply, where its groups have a multiple of 128 columns; not measured yet",
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


CpuEngine = Literal["auto", "native", "onnxruntime"]
DEFAULT_CPU_ENGINE: CpuEngine = "auto"


class CpuOptions(Section):
    """Options of programs for the CPU. GPU targets ignore them."""

    engine: CpuEngine = Field(
        default=DEFAULT_CPU_ENGINE,
        description="native: Ingot's own kernels; auto: native if they compute every node and weight, else onnxruntime",
    )
    attention: Arithmetic = Field(
        default="float32",
        description="bfloat16: attention rounds its operands to it, for speed; bfloat16-amx: likewise, on CPUs with "
        "AMX; needs cpu.engine native or auto",
    )
    mtp: bool = Field(
        default=True,
        description="keep the MTP layer of a checkpoint that has one, for drafts (speculation: mtp); native engine",
    )

    @model_validator(mode="after")
    def _bfloat16_needs_the_native_engine(self) -> Self:
        if self.attention != "float32" and self.engine == "onnxruntime":
            raise ValueError(
                f"attention is {self.attention}, which engine onnxruntime does not compute: set engine to native"
            )
        return self


AUTO: Final = "auto"
GPU_LAYERS, HOST, EXPERTS = "gpu_layers", "host", "experts"
PlaceRules = Mapping[str, int | str]
Place = Literal["auto"] | PlaceRules
"""The recipe's `place`: auto, {auto: ROWS}, {gpu_layers: N}, {host: experts}, or patterns of names and devices."""

StreamedRows = Literal["auto"] | Annotated[int, Field(ge=0, le=MOST_TOKENS)]
"""The recipe's `stream_experts`: auto, or rows of a step."""


class DeviceShare(Section):
    """A device that a model is placed on: its kind, and the memory that the model may take there."""

    cpu: ByteSize | None = Field(default=None, description="bytes of the host's memory")
    cuda: ByteSize | None = Field(default=None, description="bytes of a GPU's memory")
    hardware: str | None = Field(
        default=None,
        max_length=100,
        description="row of `ingot plan`'s hardware whose speed `place: auto` predicts with, such as epyc-9654",
    )

    @property
    def kind(self) -> str:
        """The kind of device."""
        return "cpu" if self.cuda is None else "cuda"

    @property
    def memory(self) -> int:
        """Its bytes."""
        found = self.cpu if self.cuda is None else self.cuda
        assert found is not None
        return found

    @model_validator(mode="after")
    def _is_of_one_kind(self) -> Self:
        if (self.cpu is None) == (self.cuda is None):
            raise ValueError("a device has one kind with its bytes: {cpu: 64GiB} or {cuda: 16GiB}")
        return self


def device_names(devices: Sequence[DeviceShare]) -> list[str]:
    """Return the devices' names: the kind of each and its number among those of its kind, such as cpu:1."""
    seen = Counter[str]()
    names = []
    for device in devices:
        names.append(f"{device.kind}:{seen[device.kind]}")
        seen[device.kind] += 1
    return names


def device_of(given: str, names: Sequence[str]) -> str:
    """Return the device of a name, or of a kind that has one device only; ValueError for another."""
    if given in names:
        return given
    of_kind = [name for name in names if name.partition(":")[0] == given]
    if len(of_kind) == 1:
        return of_kind[0]
    problem = "is the kind of several devices" if of_kind else "is not one of the devices"
    raise ValueError(f"{shown(given)} {problem}; name one: {one_of(names)}")


def auto_rows(place: Place) -> int | None:
    """Return the rows of the steps that `auto` makes fast, one where it names none; None for other rules."""
    if place == AUTO:
        return 1
    rows = None if isinstance(place, str) else place.get(AUTO)
    return rows if isinstance(rows, int) else None


def check_place(place: object) -> object:
    """Return a valid `place`; ValueError for one that is none of its forms."""
    forms = "auto, {auto: ROWS}, {gpu_layers: N}, {host: experts}, or patterns and devices such as {layers.0-3: cpu:1}"
    if place is None or place == AUTO:
        return place
    if not isinstance(place, Mapping):
        raise ValueError(f"{shown(place)} is not a placement; it must be {forms}")
    if not 0 < len(place) <= _MOST_PATTERNS:
        raise ValueError(f"it has {len(place)} entries; it must be {forms}, with 1 to {_MOST_PATTERNS} patterns")
    for name, value in place.items():
        if name in (AUTO, GPU_LAYERS, HOST) and len(place) > 1:
            raise ValueError(f"it has {name} and other entries; it must be {forms}")
        if name == GPU_LAYERS and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
            raise ValueError(f"{GPU_LAYERS} is {shown(value)}; it must be a whole number from 0")
        if name == AUTO and (not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST_TOKENS):
            raise ValueError(f"{AUTO} is {shown(value)}; it must be a whole number of sequences from 1")
        if name == HOST and value != EXPERTS:
            raise ValueError(f"{HOST} is {shown(value)}; it must be {EXPERTS}")
        if name not in (AUTO, GPU_LAYERS) and not isinstance(value, str):
            raise ValueError(f"{shown(name)} is {shown(value)}; it must be a device, such as cpu:1")
    return place


def check_stream_experts(given: object) -> object:
    """Return a valid `stream_experts`; ValueError for another."""
    if given == AUTO or (isinstance(given, int) and not isinstance(given, bool) and 0 <= given <= MOST_TOKENS):
        return given
    raise ValueError(
        f"{shown(given)} is not a number of rows; it must be {AUTO}, or a whole number from 0 to {MOST_TOKENS}"
    )


class PassEntry(Section):
    """One pass of the list: its name and the options that the recipe sets."""

    name: str
    options: Mapping[str, object] = Field(default_factory=dict)

    def make(self) -> Pass:
        """Construct the pass."""
        return make_pass(self.name, self.options)


class EngineSizes(Section):
    """Sizes that the runtime is built for."""

    max_batch_tokens: WholeNumber = Field(
        default=512, ge=1, le=MOST_STEP_TOKENS, description="maximum tokens per engine step"
    )
    block_tokens: WholeNumber = Field(default=16, ge=1, le=1024, description="tokens per KV block")


class EvaluationOptions(Section):
    """The text on which accuracy is measured."""

    text: GivenPath = Field(
        description="text file, relative to this recipe; `checkpoint:FILE` is a file in the checkpoint's folder"
    )
    tokens: WholeNumber = Field(
        default=AccuracyOptions.tokens,
        ge=2,
        le=MOST_TEXT_TOKENS,
        description="tokens to predict, rounded down to whole windows",
    )
    window_tokens: ContextTokens = Field(
        default=AccuracyOptions.window_tokens, description="context tokens and predicted tokens per window"
    )
    layer_kl_tokens: TextTokens | None = Field(
        default=None,
        description="tokens for the KL of each weight quantized alone; 0: not measured, null: at most 2048",
    )
    generations: Generations | None = Field(
        default=None,
        description="prompts that both continue greedily; 0: none, null: 16 if keys and values have less than float16",
    )
    generation_tokens: ContextTokens = Field(
        default=GenerationOptions.output_tokens,
        description="tokens that each of these prompts is continued by, up to the context's end",
    )

    @model_validator(mode="after")
    def _at_least_two_windows(self) -> Self:
        least = MIN_WINDOWS * self.window_tokens
        if self.tokens < least:
            raise ValueError(
                f"tokens is {self.tokens}; it must be at least two windows ({least}): raise it, or lower window_tokens"
            )
        return self


class CalibrationOptions(Section):
    """Data for calibrated passes such as gptq, and for counts of the experts that are chosen."""

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
    expert_tokens: WholeNumber = Field(
        default=64, ge=1, le=MOST_TOKENS, description="an expert that fewer tokens are routed to is rounded to nearest"
    )
    count_experts: bool = Field(
        default=True,
        description="count how often each expert of a mixture is chosen, for `ingot plan` and `place: auto`; without "
        "calibrated passes too",
    )


# These are read as validation's own options.
if TYPE_CHECKING:
    LatencySection: TypeAlias = LatencyLoad
    MemorySection: TypeAlias = MemoryOptions
else:
    LatencySection = section_of(LatencyLoad)
    MemorySection = section_of(MemoryOptions)


class VerifyRecipeOptions(Section):
    """How the features of the runtime are verified against the plain path; see `ingot verify`."""

    quick: bool = Field(
        default=True, description="fewer requests with shorter outputs and no triples: under a minute for a small model"
    )


class GenerateOptions(Section):
    """A sample text, shown at the end of the build."""

    prompt: str = Field(min_length=1, description="text to continue")
    max_tokens: ContextTokens = Field(default=64, description="maximum tokens to generate")
    temperature: float = Field(
        default=0.0, ge=0, le=100, description="0 is greedy; otherwise sampling is seeded by `seed`"
    )


class GateLimit(Section):
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
