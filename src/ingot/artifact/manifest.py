"""The schema of manifest.json.

Every model is frozen and refuses unknown keys. A change that an older reader would misread increases
SCHEMA_VERSION, and a reader refuses a newer one.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    computed_field,
    field_validator,
    model_serializer,
)

from ingot.artifact.kv_geometry import KVGeometry
from ingot.artifact.programs.recurrent_steps import ConvolutionStep, DeltaRuleStep, ScanStep
from ingot.artifact.serving import MOST_STEP_TOKENS, ServingOptions
from ingot.errors import NAME_PATTERN

SCHEMA_VERSION = 3  # 3: KV geometry per layer, with windows
CALIBRATION_FILE = "calibration.json"  # name, digest and counts of the calibration data; absent if no pass used any
SUMMARY_FILE = "evidence/summary.json"  # only an artifact that was measured has one
EngineKind = Literal["onnxruntime", "native", "cuda", "tensorrt", "onnxruntime-cuda"]
CPU_ENGINES: tuple[EngineKind, ...] = ("onnxruntime", "native")
_Count = Annotated[int, Field(ge=1, lt=2**31)]
_Column = Annotated[int, Field(ge=0, lt=2**31)]
_Number = Annotated[float, Field(allow_inf_nan=False)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelFacts(_Frozen):
    """The model's shape and special tokens."""

    family: str
    num_layers: _Count
    hidden_size: _Count
    vocab_size: _Count
    context_tokens: _Count = Field(description="longest sequence, prompt and output together")
    num_parameters: int = Field(ge=1, lt=2**63)
    eos_token_ids: tuple[_Column, ...] = ()
    bos_token_id: _Column | None = None


class ValueFacts(_Frozen):
    """A tensor that crosses a step boundary: rank 1 ([rows]) when columns is 0, else [rows, columns]."""

    dtype: Literal["float32", "float16", "int64"]
    rows: Literal["tokens", "logits"] = Field(description="T tokens of the step, or R rows of requested logits")
    columns: _Column


class SegmentStep(_Frozen):
    """Run one ONNX segment."""

    kind: Literal["segment"] = "segment"
    file: str = Field(description="path below the artifact's folder, with forward slashes")
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class RotaryTables(_Frozen):
    """cos and sin tables, float32 [positions, rotary_dim / 2] in a safetensors file, and the width that they rotate."""

    file: str = Field(description="path below the artifact's folder, with forward slashes")
    cos: str
    sin: str
    rotary_dim: int = Field(
        ge=2, lt=2**16, multiple_of=2, description="leading elements of a head that are rotated, halves as pairs; even"
    )


class SinkTensor(_Frozen):
    """Sinks of a layer's heads, float32 [num_heads] in a safetensors file."""

    file: str = Field(description="path below the artifact's folder, with forward slashes")
    name: str


class AttentionStep(_Frozen):
    """Write this step's keys and values into the KV pool, then attend: the IR's ingot::PagedAttention.

    query [T, num_heads * head_dim], key [T, num_kv_heads * head_dim], value [T, num_kv_heads * output_dim] -> output
    [T, num_heads * output_dim]. Each operand starts at a column of its value, so that all three may be slices of one.
    With `rotary`, queries and keys are first rotated by their tokens' positions, and the pool holds rotated keys. A
    layer that shares another's keys and values has none. With `sinks`, each head has a score that takes part in its
    softmax and has no value. Latent attention has a key and no value: it is the last value_dim dims of the key.
    """

    kind: Literal["attention"] = "attention"
    layer: _Column
    query: str
    key: str | None = None
    value: str | None = None
    query_column: _Column = 0
    key_column: _Column = 0
    value_column: _Column = 0
    rotary: RotaryTables | None = None
    sinks: SinkTensor | None = None
    output: str
    num_heads: _Count
    num_kv_heads: _Count
    head_dim: _Count
    scale: _Number
    softcap: _Number = Field(default=0.0, ge=0.0, description="0 means none; logits become softcap * tanh(x / softcap)")
    window: _Column = Field(default=0, description="0 means none; else a token sees itself and window - 1 before it")
    value_dim: _Count | None = Field(default=None, description="dims of a value; without it those of a key")

    @model_serializer(mode="wrap")
    def _without_default(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out value_dim where it is not set: a newer Ingot computes the same identity as an older one."""
        fields: dict[str, Any] = serialize(self)
        return fields if self.value_dim is not None else {k: v for k, v in fields.items() if k != "value_dim"}

    @property
    def output_dim(self) -> int:
        """Dims of a value, and of each head's result."""
        return self.value_dim or self.head_dim

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values that it reads; a value that has several operands is there once."""
        return tuple(dict.fromkeys(name for name in (self.query, self.key, self.value) if name is not None))


Step = SegmentStep | AttentionStep | ConvolutionStep | DeltaRuleStep | ScanStep
_AnyStep = Annotated[Step, Field(discriminator="kind")]


class Program(_Frozen):
    """Steps in order and the tensors between them; for Ingot's own engines, a file with a launch program instead.

    Every program reads the values input_ids [T], position_ids [T], logits_indices [R] and makes logits [R, vocab].
    """

    steps: tuple[_AnyStep, ...] = ()
    values: dict[str, ValueFacts] = Field(default_factory=dict)
    launches: str | None = Field(
        default=None, description="a launch program as JSON: a CudaProgram, or a CpuProgram for the engine native"
    )


class FileEntry(_Frozen):
    """One file of the artifact."""

    bytes: int = Field(ge=0, lt=2**63)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class GateOutcome(_Frozen):
    """The verdict of one gate of the recipe; evidence/ has the details."""

    name: str
    verdict: Literal["PASS", "FAIL", "UNDECIDED"]
    measured: float
    low: float = Field(description="lower end of the 95 % confidence interval")
    high: float
    limit: float
    bound: Literal["max", "min"]
    advisory: bool = Field(default=False, description="reported, but does not decide whether the artifact is sealed")


ArtifactVerdict = Literal["passed", "not passed", "no gates", "not measured"]

_WARNINGS: Mapping[ArtifactVerdict, str] = {
    "not passed": "NOT PASSED: a gate of this artifact did not pass",
    "no gates": "NO GATES: this artifact was measured, but no gate had to pass before it was sealed",
    "not measured": "NOT MEASURED: this artifact was sealed without accuracy, latency or gates",
}


def artifact_verdict(gates: tuple[GateOutcome, ...], measured: bool) -> ArtifactVerdict:
    """Return what an artifact's gates prove. Advisory gates prove nothing: they do not prevent a seal."""
    required = [gate.verdict for gate in gates if not gate.advisory]
    if required:
        return "passed" if set(required) == {"PASS"} else "not passed"
    return "no gates" if measured else "not measured"


def verdict_warning(verdict: ArtifactVerdict) -> str | None:
    """Return the sentence to show with every use of an artifact that no gate has passed; None for "passed"."""
    return _WARNINGS.get(verdict)


class Manifest(_Frozen):
    """manifest.json. Its `verdict` is derived from gates and files; opening refuses a file that states another one."""

    schema_version: int = Field(default=SCHEMA_VERSION, ge=1, le=SCHEMA_VERSION)
    name: str = Field(pattern=NAME_PATTERN, max_length=128, description="the recipe's name; fit for a folder")
    identity: str = Field(pattern=r"^[0-9a-f]{64}$", description="digest of program, weights, tokenizer and recipe")
    evidence: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$", description="digest of evidence/")
    model: ModelFacts
    kv: KVGeometry
    target: str
    engine: EngineKind
    max_batch_tokens: int = Field(
        default=512, ge=1, le=MOST_STEP_TOKENS, description="most tokens of one engine step, by default"
    )
    serving: ServingOptions | None = Field(default=None, description="defaults of `Engine.load`; not of the identity")
    program: Program
    files: dict[str, FileEntry]
    versions: dict[str, str]
    gates: tuple[GateOutcome, ...] = ()
    digest: str | None = Field(
        default=None, pattern=r"^[0-9a-f]{64}$", description="digest of the other fields of the manifest"
    )

    @field_validator("kv")
    @classmethod
    def _has_layers(cls, kv: KVGeometry) -> KVGeometry:
        if kv.num_layers < 1:
            raise ValueError("num_layers is 0; a model has one at least")
        return kv

    @computed_field  # type: ignore[prop-decorator]  # pydantic's documented order of the two
    @property
    def verdict(self) -> ArtifactVerdict:
        """Result of the measurements and gates."""
        return artifact_verdict(self.gates, SUMMARY_FILE in self.files)

    @property
    def program_bytes(self) -> int:
        """Size of the program and its weights, which are loaded, in bytes."""
        return sum(entry.bytes for name, entry in self.files.items() if name.startswith("program/"))

    @property
    def on_cpu(self) -> bool:
        """Whether its engine runs on the CPU."""
        return self.engine in CPU_ENGINES

    @property
    def warning(self) -> str | None:
        """Sentence to show with every use, with NOT MEASURED, NO GATES or NOT PASSED; None if gates passed."""
        return verdict_warning(self.verdict)
