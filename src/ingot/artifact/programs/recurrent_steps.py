"""Steps of a program of segments that are recurrent layers: the ops of passes/recurrent_ops.py, run by Ingot's kernels.

Each reads and replaces its part of the sequences' side state, and makes `output` [T, columns] from values
[T, columns]; `widths` has the columns.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from ingot.artifact.programs.recurrent import ConvolutionFacts, DeltaRuleFacts, RecurrentFacts, ScanFacts


class StepTensor(BaseModel):
    """A float32 tensor in a safetensors file of the artifact."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    file: str = Field(description="path below the artifact's folder, with forward slashes")
    name: str


class ConvolutionStep(ConvolutionFacts):
    """A short convolution; weight [channels, taps], bias [channels]."""

    kind: Literal["convolution"] = "convolution"
    input: str
    output: str
    weight: StepTensor
    bias: StepTensor | None = None

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values that it reads, each once."""
        return _inputs(self)

    @property
    def tensors(self) -> tuple[StepTensor, ...]:
        """The tensors that it reads."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)


class DeltaRuleStep(DeltaRuleFacts):
    """A gated delta rule."""

    kind: Literal["delta-rule"] = "delta-rule"
    query: str
    key: str
    value: str
    decay: str
    beta: str
    output: str

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values that it reads, each once."""
        return _inputs(self)

    @property
    def tensors(self) -> tuple[StepTensor, ...]:
        """The tensors that it reads: none."""
        return ()


class ScanStep(ScanFacts):
    """A selective scan; a and d [num_heads]."""

    kind: Literal["scan"] = "scan"
    input: str
    dt: str
    b: str
    c: str
    output: str
    a: StepTensor
    d: StepTensor

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values that it reads, each once."""
        return _inputs(self)

    @property
    def tensors(self) -> tuple[StepTensor, ...]:
        """The tensors that it reads."""
        return self.a, self.d


RecurrentStep = ConvolutionStep | DeltaRuleStep | ScanStep


def _inputs(step: RecurrentFacts) -> tuple[str, ...]:
    return tuple(dict.fromkeys(getattr(step, name) for name in step.widths if name != "output"))
