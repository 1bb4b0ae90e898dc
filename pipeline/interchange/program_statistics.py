"""Statistics of an artifact's quantized weights from its program, without checkpoint and configuration."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np

from ingot.artifact import Artifact
from ingot.passes.numerics.arrays import CodeArray
from ingot.passes.numerics.scheme import ScaleDtype
from ingot.passes.numerics.weight_statistics import end_share, scale_statistics
from ingot.pipeline.checkpoint.formats.codes import FloatArray
from ingot.pipeline.checkpoint.formats.decoded import DecodedWeight
from ingot.pipeline.checkpoint.tensors import EMBEDDING
from ingot.pipeline.interchange.artifact_weights import program_operands
from ingot.pipeline.targets.segments.weight_operands import Codes

HISTOGRAM_BINS = 16
_LARGEST_FLOAT8 = 448


@dataclass(frozen=True)
class ProgramWeight:
    """Statistics of one quantized weight.

    name              the layer's, such as "layers.0.mlp.down_proj"
    block_size        columns that share a scale; 0: one scale per row
    end_share         share of codes at the ends of their range
    code_histogram    counts over the range of the codes, in at most HISTOGRAM_BINS bins of equal width
    """

    name: str
    tensor: str
    bits: int
    block_size: int
    symmetric: bool
    elements: int
    kind: Literal["integer", "float"]
    activations: str
    stored_bytes: int
    scale_min: float
    scale_median: float
    scale_max: float
    scale_dtype: ScaleDtype
    end_share: float
    code_histogram: tuple[int, ...]
    read: Callable[[], FloatArray]


def program_statistics(artifact: Artifact) -> Iterator[ProgramWeight]:
    """Yield every quantized weight in the program's order, one in memory at a time.

    Weights of ops without a reader are left out.
    """
    model = artifact.manifest.model
    shapes = {EMBEDDING: (model.vocab_size, model.hidden_size)}
    for operand in program_operands(artifact, shapes, complete=False):
        if isinstance(operand.content, Codes):
            decode = partial(operand.content.decode, slice(0, operand.rows))
            name = operand.name.removeprefix("model.").removesuffix(".weight")
            activations = operand.content.activations.words if operand.content.activations else ""
            yield _weight(name, operand.stored, decode, operand.num_bytes, activations)


def _weight(
    name: str, tensor: str, decode: Callable[[], DecodedWeight], num_bytes: int, activations: str
) -> ProgramWeight:
    weight = decode()
    low, high = _range(weight)
    return ProgramWeight(
        name=name,
        tensor=tensor,
        bits=weight.bits,
        block_size=0 if weight.group_size == weight.codes.shape[1] else weight.group_size,
        symmetric=weight.zero_points is None,
        elements=weight.codes.size,
        kind=weight.kind,
        activations=activations,
        stored_bytes=num_bytes,
        **scale_statistics(weight.scales),
        end_share=end_share(weight.codes, low, high),
        code_histogram=_histogram(weight.codes, low, high),
        read=lambda: decode().dequantize(),
    )


def _range(weight: DecodedWeight) -> tuple[int, int]:
    if weight.kind == "float":
        return -_LARGEST_FLOAT8, _LARGEST_FLOAT8
    levels = 1 << weight.bits
    return (-levels // 2, levels // 2 - 1) if weight.codes.dtype == np.int8 else (0, levels - 1)


def _histogram(codes: CodeArray, low: int, high: int) -> tuple[int, ...]:
    bins = min(HISTOGRAM_BINS, high - low + 1)
    counts, _ = np.histogram(codes, bins=bins, range=(low, high + 1))
    return tuple(int(count) for count in counts)
