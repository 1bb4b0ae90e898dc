"""What a calibrated pass asks for, and who answers: a service that runs the IR on calibration data.

The service walks the IR stage by stage. A stage begins with the linear layers that can run next, all of them on inputs
that are known by now; while the pass holds the stage it may look at those inputs and change those layers' weights. When
it asks for the next stage, this one is run with the weights that the IR then has. So what a layer is fed is always the
output of what stands before it, as the pass left it: already quantized.

    for stage in require_calibration(self.name).stages(model):
        for group in stage.groups:
            gram = stage.gram(group.source)                              # X^T X
            for node in group.linears:
                ...                                                      # replace the node's weight operand

`pipeline.calibrate` has the service; the compiler lends it to the passes of a recipe:

    with calibrate_with(service):
        manager.run(model)

A calibrated pass's decisions as arrays, and back: what CalibrationStage.remember is given and recall gives.

    known, made = stage.recall(), {}
    ...
    rounder = Recalled(known, name) if known is not None else ...       # rounds the weight of that name
    made |= weight_arrays(name, rounded, facts)
    ...
    if known is None:
        stage.remember(made)

Everything comes back bit for bit, floats among the facts, too.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, fields
from json import dumps
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.errors import PassError
from ingot.passes.numerics.rounding import RoundedWeight

CALIBRATION_KEY = "ingot.calibration"  # model.metadata_props: JSON of CalibrationFacts

Float32Array = NDArray[np.float32]
Float64Array = NDArray[np.float64]
Arrays = Mapping[str, NDArray[Any]]
Trial = Mapping[ir.Value, Callable[[], Float32Array]]  # what a layer reads as its weight -> another [out, in]
WeightSource = Callable[[ir.Value], Float32Array | None]  # the value to compute with; None: the one that the IR holds
BlockRun = Callable[[Mapping[ir.Node, Float32Array]], Sequence[Float32Array]]


@dataclass(frozen=True)
class CalibrationFacts:
    """Which data a model was calibrated on: a text by name and digest, and what was drawn from it.

    kind              "text", "jsonl" or "folder"
    packing           "packed": sequences of `sequence_tokens`; "documents": one a document, which may be shorter
    documents         those of the text that hold a token
    missing_tokens    what sequences lack to `sequence_tokens`, all together
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

    @property
    def tokens(self) -> int:
        """Tokens that every layer sees."""
        return self.sequences * self.sequence_tokens - self.missing_tokens

    def record(self, model: ir.Model) -> None:
        """Write the facts into the IR's metadata."""
        model.metadata_props[CALIBRATION_KEY] = dumps(asdict(self) | {"tokens": self.tokens})


@dataclass(frozen=True)
class LinearGroup:
    """Linear layers that read one value, in graph order: Gemm(source, W, b?, transB=1) each."""

    source: ir.Value
    linears: tuple[ir.Node, ...]


class CalibrationStage(Protocol):
    """The linear layers that run next, and what they are fed."""

    @property
    def groups(self) -> Sequence[LinearGroup]:
        """The stage's linear layers, by the value that they read."""
        ...

    def recall(self) -> Arrays | None:
        """What the pass remembered of this stage in a build that was cut off; None when it has to do its work.

        It was the same pass with the same options on the same model and data. A pass that recalls changes the weights
        as it did then and need not look at the inputs of the stage; nothing is run for those that nobody looks at.
        """
        ...

    def remember(self, arrays: Arrays) -> None:
        """Keep what the pass decided, once a stage, when its work is done: enough to change the weights again.

        A pass that never remembers starts from the beginning when a build was cut off.
        """
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
        """A function that runs these nodes on about that many calibration tokens, whole sequences, and gives `outputs`.

        The nodes may reach beyond the stage; what they read from outside must be known by now. The function's argument
        replaces the weights [out, in] of some of the linear layers among them.
        """
        ...

    def divergences(self, trials: Sequence[Trial], tokens: int) -> Sequence[float]:
        """KL(model || model with other weights) of each trial, in nats: the mean over all positions of about so many
        calibration tokens, whole sequences, the same ones at every stage.

        A trial names operands of linear layers of this stage or later ones, or of the embedding. The model that it is
        compared with is the IR as it was when this was first asked: a pass that changes weights between two stages
        finds what it has changed already in every later trial's loss. A weight is asked for once by each level that
        reads it.
        """
        ...


class Divergence(Protocol):
    """KL(float model || model) on calibration data, batch by batch, for whatever its stored values are tried to be."""

    @property
    def batches(self) -> int:
        """How many there are: whole sequences, of about so many tokens as were asked for."""
        ...

    def value(self, batch: int, weights: WeightSource) -> float:
        """Mean over the batch's positions, in nats."""
        ...

    def gradients(self, batch: int, weights: WeightSource, receive: Callable[[ir.Value, Float32Array], None]) -> float:
        """The same; `receive` gets the gradient by each wanted value, from the last layer to the first.

        A value may be changed once its gradient was received: nothing more of this batch is computed with it.
        """
        ...


class Calibration(Protocol):
    """Runs an IR on calibration data."""

    @property
    def facts(self) -> CalibrationFacts:
        """What the data is."""
        ...

    def stages(self, model: ir.Model) -> Iterator[CalibrationStage]:
        """Every stage in order, the head's among them. A stage is valid until the next one is asked for."""
        ...

    def divergence(
        self, model: ir.Model, wanted: Sequence[ir.Value], batch_tokens: int
    ) -> AbstractContextManager[Divergence]:
        """The divergence from the model that the recipe began with, and gradients by the wanted stored values.

        Each of these is read by one linear layer or norm. PassError where that model is not known.
        """
        ...


_service: ContextVar[Calibration | None] = ContextVar("ingot.passes.calibration", default=None)


@contextmanager
def calibrate_with(service: Calibration | None) -> Iterator[None]:
    """Lend the service to the passes that run within the block; None lends nothing."""
    token = _service.set(service)
    try:
        yield
    finally:
        _service.reset(token)


def require_calibration(name: str) -> Calibration:
    """The service, for the pass of that name; PassError when nothing was lent."""
    service = _service.get()
    if service is None:
        raise PassError(
            f"{name}: needs calibration data; give the recipe a section `calibration: {{text: FILE}}`, or, in Python, "
            "run the pass within `ingot.passes.calibration.calibrate_with(...)`"
        )
    return service


def fact_arrays(name: str, facts: Mapping[str, object]) -> dict[str, NDArray[Any]]:
    """JSON values under a name."""
    return {f"{name}.facts": np.frombuffer(json.dumps(dict(facts)).encode(), np.uint8)}


def recalled_facts(arrays: Arrays, name: str) -> dict[str, Any]:
    """What fact_arrays was given."""
    facts: dict[str, Any] = json.loads(arrays[f"{name}.facts"].tobytes())
    return facts


def weight_arrays(name: str, rounded: RoundedWeight, facts: Mapping[str, object]) -> dict[str, NDArray[Any]]:
    """A rounded weight, and facts about it, under a name."""
    values = {field.name: getattr(rounded, field.name) for field in fields(rounded)}
    arrays = {f"{name}.{key}": value for key, value in values.items() if isinstance(value, np.ndarray)}
    numbers = {key: value for key, value in values.items() if isinstance(value, float)}
    return {**arrays, **fact_arrays(name, {"facts": dict(facts), "numbers": numbers})}


@dataclass
class Recalled:
    """Gives the weight of that name as it was rounded before, whatever the values are."""

    arrays: Arrays
    name: str
    facts: dict[str, object] = field(default_factory=dict)

    def __call__(self, values: NDArray[Any]) -> RoundedWeight:
        found = recalled_facts(self.arrays, self.name)
        self.facts = found["facts"]
        parts = {field.name: self.arrays.get(f"{self.name}.{field.name}") for field in fields(RoundedWeight)}
        return RoundedWeight(**{**parts, **found["numbers"]})
