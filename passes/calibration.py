"""The interface between calibrated passes and the service that runs the IR on calibration data.

The service walks the IR stage by stage. A stage is the linear layers that can run next, whose inputs are computed by
then. While the pass holds a stage it may read those inputs and change those layers' weights; for the next stage the
service runs this one with the new weights. So every layer is calibrated on the output of already quantized layers.

    for stage in require_calibration(self.name).stages(model):
        recorded, made = stage.recorded(), {}
        for group in stage.groups:
            for node in group.linears:
                name = node.name
                rounder = RecordedWeight(recorded, name) if recorded else ...   # from stage.gram(group.source)
                ...                                                  # replace the node's weight operand
                made |= weight_arrays(name, rounded, facts)
        if recorded is None:
            stage.record(made)

`record` keeps a stage's decisions as arrays, so that an interrupted build resumes; they come back bit for bit, floats
in the facts included. The service itself is in `ingot.pipeline.calibrate`; the compiler lends it to a recipe's passes:

    with calibrate_with(service):
        manager.run(model)

`report_error`, `report_kept` and `note_errors` show the errors of layers and what a pass gained in all.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.errors import PassError
from ingot.passes.model_facts import Fact
from ingot.passes.numerics.arrays import Float32Array, Float64Array
from ingot.passes.numerics.rounding import RoundedWeight
from ingot.progress import detail, note


def report_error(name: str, layer: str, nearest: float, after: float) -> None:
    """Report a rounded layer: the error of its outputs, rounded to the nearest and as the pass rounded it."""
    detail(name, f"{layer} {nearest:.2%} -> {after:.2%}")


def report_kept(name: str, layer: str, kept: int, of: int, error: float) -> None:
    """Report a pruned layer: what the pass kept of it, and the error of its outputs."""
    detail(name, f"{layer} keeps {kept} of {of}, {error:.2%}")


def note_errors(name: str, errors: Mapping[str, tuple[float, float]]) -> None:
    """Note at the end of a pass what it gained, from the errors (nearest, after) by layer."""
    if not errors:
        return
    nearest, after = (sum(pair[at] for pair in errors.values()) / len(errors) for at in (0, 1))
    worst = max(errors, key=lambda layer: errors[layer][1])
    note(
        f"{name}: error of the outputs of {len(errors)} layers on the calibration data {after:.2%} on average, "
        f"{nearest:.2%} when rounded to the nearest; the largest {errors[worst][1]:.2%}, {worst}"
    )


Arrays = Mapping[str, NDArray[Any]]
Trial = Mapping[ir.Value, Callable[[], Float32Array]]  # weight operand of a layer -> another weight [out, in]
WeightSource = Callable[[ir.Value], Float32Array | None]  # values to compute with; None: those of the IR
BlockRun = Callable[[Mapping[ir.Node, Float32Array]], Sequence[Float32Array]]


@dataclass(frozen=True)
class CalibrationFacts:
    """Calibration data of a model: a text by name and digest, and the tokens sampled from it.

    evaluation_overlap    share of the evaluated tokens in runs of 32 that the text has too; None without evaluation
    kind              "text", "jsonl" or "folder"
    packing           "packed": sequences of `sequence_tokens`; "documents": one per document, possibly shorter
    documents         number of documents in the text that are not empty
    missing_tokens    sequences * sequence_tokens, less the tokens that there are
    """

    text: str
    sha256: str
    text_tokens: int
    sequences: int
    sequence_tokens: int
    seed: int
    kind: str = "text"
    packing: str = "packed"
    documents: int = 1
    missing_tokens: int = 0
    evaluation_overlap: float | None = None

    @property
    def tokens(self) -> int:
        """Tokens that every layer is calibrated on."""
        return self.sequences * self.sequence_tokens - self.missing_tokens

    def as_json(self) -> dict[str, object]:
        """The facts with the count of tokens."""
        return asdict(self) | {"tokens": self.tokens}

    def record(self, model: ir.Model) -> None:
        """Record the facts on the model."""
        CALIBRATION_FACTS.record(model, self)


CALIBRATION_FACTS = Fact("ingot.calibration", CalibrationFacts, CalibrationFacts.as_json)


@dataclass(frozen=True)
class LinearGroup:
    """The linear layers Gemm(source, W, b?, transB=1) that read one value, in graph order."""

    source: ir.Value
    linears: tuple[ir.Node, ...]


class CalibrationStage(Protocol):
    """The linear layers that run next, and their inputs."""

    @property
    def groups(self) -> Sequence[LinearGroup]:
        """The stage's linear layers, grouped by the value that they read."""
        ...

    def recorded(self) -> Arrays | None:
        """The arrays that an interrupted build recorded at this stage; None when the pass has to compute them.

        The pass, its options, the model and the data were the same. With recorded arrays a pass changes the weights as
        it did then, without reading inputs: the service does not run a stage whose inputs are not read.
        """
        ...

    def record(self, arrays: Arrays) -> None:
        """Keep the pass's decisions at this stage, enough to change the weights again; call it once, at the end.

        Without it, the pass starts from its first stage when a build is resumed.
        """
        ...

    def tokens(self, source: ir.Value) -> int:
        """Calibration tokens that reach a group: all, or those that are routed to an expert."""
        ...

    def too_few(self, source: ir.Value) -> str:
        """Return why an expert is left without calibration: too few tokens are routed to it. "" for any other layer."""
        ...

    def gram(self, source: ir.Value) -> Float64Array:
        """X^T X [in, in] of a group's input X [tokens, in], summed over all calibration tokens."""
        ...

    def mean_absolute(self, source: ir.Value) -> Float64Array:
        """Mean |x| of each channel [in] over all calibration tokens."""
        ...

    def max_absolute(self, source: ir.Value) -> Float64Array:
        """Largest |x| of each channel [in] over all calibration tokens; NaN where a channel holds one."""
        ...

    def rows(self, source: ir.Value, count: int) -> Float32Array:
        """At most `count` rows of a group's input, evenly spread over the calibration tokens: [rows, in]."""
        ...

    def block(self, nodes: Sequence[ir.Node], outputs: Sequence[ir.Value], tokens: int) -> BlockRun:
        """Return a function that runs these nodes on whole sequences of about `tokens` tokens and returns `outputs`.

        The nodes may reach beyond the stage; what they read from outside must be computed by now. The function's
        argument replaces the weights [out, in] of some of the linear layers among them.
        """
        ...

    def divergences(self, trials: Sequence[Trial], tokens: int) -> Sequence[float]:
        """KL(model || model with other weights) of each trial, in nats.

        The mean over all positions of whole sequences of about `tokens` tokens, the same ones at every stage. A trial
        names operands of linear layers of this stage or later ones, or of the embedding. The reference is the IR as it
        was at the first call: weights that the pass has changed since then count in every later trial. A trial's
        function is called once for each stage that reads the weight.
        """
        ...


class Divergence(Protocol):
    """KL(float model || model) on calibration data, batch by batch, with trial values for stored weights."""

    @property
    def batches(self) -> int:
        """Number of batches; each holds whole sequences of about `batch_tokens` tokens."""
        ...

    def value(self, batch: int, weights: WeightSource) -> float:
        """KL in nats, the mean over the batch's positions."""
        ...

    def gradients(self, batch: int, weights: WeightSource, receive: Callable[[ir.Value, Float32Array], None]) -> float:
        """Return the value; call `receive` with the gradient of each wanted value, from the last layer to the first.

        A value may be changed once its gradient was received: the rest of this batch does not read it.
        """
        ...


class Calibration(Protocol):
    """Runs an IR on calibration data."""

    @property
    def facts(self) -> CalibrationFacts:
        """The calibration data."""
        ...

    def stages(self, model: ir.Model) -> Iterator[CalibrationStage]:
        """Every stage in order, the head's included. A stage is valid until the next one begins."""
        ...

    def divergence(
        self, model: ir.Model, wanted: Sequence[ir.Value], batch_tokens: int
    ) -> AbstractContextManager[Divergence]:
        """The divergence from the model that the recipe began with, and its gradients by the wanted stored values.

        Each wanted value is read by one linear layer or norm. PassError when that model is not available.
        """
        ...


_service: ContextVar[Calibration | None] = ContextVar("ingot.passes.calibration", default=None)


@contextmanager
def calibrate_with(service: Calibration | None) -> Iterator[None]:
    """Lend the service to the passes that run within the block; None lends none."""
    token = _service.set(service)
    try:
        yield
    finally:
        _service.reset(token)


def require_calibration(name: str) -> Calibration:
    """Return the service to the pass of that name; PassError when none was lent."""
    service = _service.get()
    if service is None:
        raise PassError(
            f"{name}: needs calibration data; give the recipe a section `calibration: {{text: FILE}}`, or, in Python, "
            "run the pass within `ingot.passes.calibration.calibrate_with(...)`"
        )
    return service


def fact_arrays(name: str, facts: Mapping[str, object]) -> dict[str, NDArray[Any]]:
    """Encode JSON values as an array, under a name."""
    return {f"{name}.facts": np.frombuffer(json.dumps(dict(facts)).encode(), np.uint8)}


def recorded_facts(arrays: Arrays, name: str) -> dict[str, Any]:
    """Decode the facts that `fact_arrays` encoded under this name."""
    facts: dict[str, Any] = json.loads(arrays[f"{name}.facts"].tobytes())
    return facts


def weight_arrays(name: str, rounded: RoundedWeight, facts: Mapping[str, object]) -> dict[str, NDArray[Any]]:
    """Encode a rounded weight and facts about it as arrays, under a name."""
    values = {field.name: getattr(rounded, field.name) for field in fields(rounded)}
    arrays = {f"{name}.{key}": value for key, value in values.items() if isinstance(value, np.ndarray)}
    numbers = {key: value for key, value in values.items() if isinstance(value, float)}
    return {**arrays, **fact_arrays(name, {"facts": dict(facts), "numbers": numbers})}


@dataclass
class RecordedWeight:
    """A rounder that returns the recorded weight of that name, whatever values it is called with.

    facts    the recorded facts, once it was called
    """

    arrays: Arrays
    name: str
    facts: dict[str, object] = field(default_factory=dict)

    def __call__(self, values: NDArray[Any]) -> RoundedWeight:
        found = recorded_facts(self.arrays, self.name)
        self.facts = found["facts"]
        parts = {field.name: self.arrays.get(f"{self.name}.{field.name}") for field in fields(RoundedWeight)}
        return RoundedWeight(**{**parts, **found["numbers"]})
