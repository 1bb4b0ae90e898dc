"""A lowered segment: an ONNX model whose inputs are rows and weights, and the IR's values that its names refer to."""

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from ingot.pipeline.targets.segments.segment_builder import NumberFormat, SegmentWeight, dims, renumber_layers

INLINE_BYTES = 1024  # constants up to this size belong to a segment's structure, larger ones are its weights


@dataclass(frozen=True)
class Segment:
    """One segment, ready to be built.

    model             inputs are activations, the runtime's int64 inputs and weights; outputs are y0, y1 ...
    inputs            the model's inputs that are not weights -> the IR's values
    outputs           the model's outputs -> the IR's values
    weights           the model's inputs that are weights
    number_formats    what the GPU must be able to compute
    first_layer       the IR's number of the layer that the model calls 0
    """

    model: ir.Model
    inputs: Mapping[str, ir.Value]
    outputs: Mapping[str, ir.Value]
    weights: Mapping[str, SegmentWeight]
    number_formats: frozenset[NumberFormat]
    first_layer: int

    @property
    def name(self) -> str:
        """The IR's name of the last output, which is unique among segments."""
        return list(self.outputs.values())[-1].name or ""

    @property
    def rows(self) -> Mapping[str, tuple[int, ...]]:
        """Inputs whose first dimension is the rows (activations, positions), with their other dimensions."""
        inputs = (value for value in self.model.graph.inputs if value.name in self.inputs)
        return {value.name or "": tuple(int(size) for size in dims(value)[1:]) for value in inputs}

    @property
    def vectors(self) -> tuple[str, ...]:
        """Weights with at most one dimension above 1."""
        return tuple(name for name, weight in self.weights.items() if sum(size > 1 for size in weight.shape) < 2)

    @property
    def row_symbol(self) -> str:
        """Symbol of the rows: T for tokens, R for rows of logits."""
        return str(dims(self.model.graph.outputs[0])[0])

    @property
    def constant_bytes(self) -> int:
        """Bytes of the constants that are not part of the structure."""
        tensors = (value.const_value for value in self.model.graph.initializers.values())
        return sum(tensor.nbytes for tensor in tensors if tensor is not None and tensor.nbytes > INLINE_BYTES)

    def copied_model(self) -> ir.Model:
        """Copy the model to bind or write it; the copy shares the tensors."""
        return ir.Model(self.model.graph.clone(), ir_version=self.model.ir_version, producer_name="ingot")

    def with_original_layers(self, text: str) -> str:
        """Put the IR's layer numbers into a message of the engine."""
        return renumber_layers(text, self.first_layer)
