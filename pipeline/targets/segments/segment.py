"""A lowered segment: a model with rows and weights as inputs, and what of the IR stands behind its names."""

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from ingot.pipeline.targets.segments.builder import PlanWeight, dims, original_names
from ingot.pipeline.targets.tensorrt.sms import Form

INLINE_BYTES = 1024  # constants up to this size belong to a segment's structure, larger ones are its weights


@dataclass(frozen=True)
class Segment:
    """One segment, ready to be built.

    model      inputs are activations, the runtime's int64 inputs and weights; outputs y0, y1 ...
    inputs     the model's inputs that are no weights -> the IR's values
    outputs    the model's outputs -> the IR's values
    weights    the model's inputs that are weights
    forms      what its cards must be able to compute
    first_layer    the IR's number of the layer that the model calls 0
    """

    model: ir.Model
    inputs: Mapping[str, ir.Value]
    outputs: Mapping[str, ir.Value]
    weights: Mapping[str, PlanWeight]
    forms: frozenset[Form]
    first_layer: int

    @property
    def name(self) -> str:
        """The IR's name of its last result, which tells segments apart."""
        return list(self.outputs.values())[-1].name or ""

    @property
    def rows(self) -> Mapping[str, tuple[int, ...]]:
        """Inputs whose first dimension is the rows: activations and positions, with their other dimensions."""
        inputs = (value for value in self.model.graph.inputs if value.name in self.inputs)
        return {value.name or "": tuple(int(size) for size in dims(value)[1:]) for value in inputs}

    @property
    def vectors(self) -> tuple[str, ...]:
        """Weights that are no matrices."""
        return tuple(name for name, weight in self.weights.items() if sum(size > 1 for size in weight.shape) < 2)

    @property
    def row_symbol(self) -> str:
        """What the rows are: T tokens, or R rows of logits."""
        return str(dims(self.model.graph.outputs[0])[0])

    @property
    def constant_bytes(self) -> int:
        """Of the constants that are no part of its structure."""
        tensors = (value.const_value for value in self.model.graph.initializers.values())
        return sum(tensor.nbytes for tensor in tensors if tensor is not None and tensor.nbytes > INLINE_BYTES)

    def copied_model(self) -> ir.Model:
        """The model again, sharing its tensors, to bind or to write."""
        return ir.Model(self.model.graph.clone(), ir_version=self.model.ir_version, producer_name="ingot")

    def originals(self, text: str) -> str:
        """A message of TensorRT's with the IR's numbers of layers."""
        return original_names(text, self.first_layer)
