"""Weights as writers take them, from three sources: a compiled model, a recipe that has not run yet, a checkpoint.

    weights_of_model          the IR after quantization passes: plain tensors, codes with their scales
    weights_before_passes     facts of the weights that passes will leave, without codes
    weights_of_checkpoint     a checkpoint's files, without the IR and without a change of value

The fourth source, a sealed artifact, is artifact_weights.py.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.errors import UsageError, shown
from ingot.passes.base import Pass
from ingot.passes.numerics.scheme import Scheme
from ingot.passes.quantization.activation_nodes import split_layers
from ingot.passes.quantization.channel_scaling import INPUT_SCALE
from ingot.passes.quantization.quantize_weights import QuantizeWeights
from ingot.passes.quantization.weight_nodes import weight_bits
from ingot.passes.weights import apply_to_array
from ingot.pipeline.checkpoint.checkpoint import WEIGHT_DTYPES, Checkpoint
from ingot.pipeline.checkpoint.config.decoder import read_config
from ingot.pipeline.checkpoint.encoded_values import EncodedValues
from ingot.pipeline.checkpoint.families import FAMILIES
from ingot.pipeline.checkpoint.formats.activations import InputScheme, activations_of_node
from ingot.pipeline.checkpoint.formats.decoded import DecodedWeight, EncodedTensor
from ingot.pipeline.checkpoint.formats.exact_forms import MAX_BITS
from ingot.pipeline.checkpoint.tensors import EMBEDDING, HEAD, check_tensors
from ingot.pipeline.interchange.layers import (
    LayerFacts,
    PlainWeight,
    QuantizedLayer,
    Weight,
    facts_of,
    lazy_tensor,
    stored_tensor,
)
from ingot.progress import report_progress

_CODE_TYPES = {
    ir.DataType.INT4: np.int8,
    ir.DataType.INT8: np.int8,
    ir.DataType.UINT4: np.uint8,
    ir.DataType.UINT8: np.uint8,
    ir.DataType.FLOAT8E4M3FN: np.float32,
}


def weights_of_model(model: ir.Model, names: Iterable[str]) -> dict[str, Weight]:
    """Return the named weights of a model that only quantization has changed, and a tied head's own copy if it has one.

    Every quantized weight is read once for its facts. UsageError when layers keep outlier channels or scale inputs.
    """
    _refuse_split_layers(model.graph)
    _refuse_input_scales(model.graph)
    initializers = model.graph.initializers
    copies = [name for name in (HEAD,) if name in initializers or f"{name}.q" in initializers]
    found = {name: _weight(initializers, name) for name in dict.fromkeys([*names, *copies])}
    if _is_heads_alone(initializers):  # the codes of a tied head have the table's name
        found |= {EMBEDDING: PlainWeight(EMBEDDING, _tensor(initializers[EMBEDDING]))}
        found[HEAD] = _weight(initializers, EMBEDDING, HEAD)
    return found


def _is_heads_alone(initializers: Mapping[str, ir.Value]) -> bool:
    """Return whether a tied head is quantized and the embedding table, its float copy, is not."""
    if f"{EMBEDDING}.q" not in initializers or EMBEDDING not in initializers:
        return False
    node = next(iter(initializers[f"{EMBEDDING}.q"].consumers()))
    return all(reader.op_type != "Gather" for reader in node.outputs[0].consumers())


def _refuse_split_layers(graph: ir.Graph) -> None:
    split = split_layers(graph)
    if split:
        raise UsageError(
            f"{shown(split[0])} and {len(split) - 1} more layers keep outlier channels next to their 8-bit inputs; no "
            "checkpoint format can hold them: set outliers and outlier_threshold to 0, or export to onnx"
        )


def _refuse_input_scales(graph: ir.Graph) -> None:
    scaled = [name.removesuffix(INPUT_SCALE) for name in graph.initializers if name.endswith(INPUT_SCALE)]
    if scaled:
        raise UsageError(
            f"{shown(scaled[0])} and {len(scaled) - 1} more layers have their inputs scaled by a Mul; no checkpoint "
            "format can hold it: set awq's `fold: exact`, or export to onnx"
        )


def _weight(initializers: Mapping[str, ir.Value], name: str, exported_as: str | None = None) -> Weight:
    if f"{name}.q" not in initializers:
        return PlainWeight(name, _tensor(initializers[name]))
    node = next(iter(initializers[f"{name}.q"].consumers()))
    read = partial(_read_codes, node)
    return QuantizedLayer(exported_as or name, facts_of(read()), read, _activations(node))


def _activations(node: ir.Node) -> InputScheme | None:
    """Return how the inputs of the linear layer that reads a DequantizeLinear are quantized."""
    reader = next(iter(node.outputs[0].consumers()))
    maker = None if reader.op_type != "Gemm" or reader.inputs[0] is None else reader.inputs[0].producer()
    return None if maker is None else activations_of_node(maker.metadata_props)


def _read_codes(node: ir.Node) -> DecodedWeight:
    """Return the operands of a DequantizeLinear."""
    codes, scales, *zero_point = (_tensor(value) for value in node.inputs if value is not None)
    kind = _CODE_TYPES[codes.dtype]
    stored = apply_to_array(codes, lambda values: values.astype(kind))
    return DecodedWeight(
        codes=stored,
        scales=_columns(np.asarray(scales.numpy())).astype(np.float32),
        group_size=node.attributes.get_int("block_size", 0) or stored.shape[1],
        zero_points=_columns(np.asarray(zero_point[0].numpy())).astype(np.int16) if zero_point else None,
        bits=weight_bits(node),
    )


def _columns(values: NDArray[Any]) -> NDArray[Any]:
    return values[:, None] if values.ndim == 1 else values


def _tensor(value: ir.Value) -> ir.TensorProtocol:
    assert value.const_value is not None
    return value.const_value


def weights_before_passes(model: ir.Model, passes: Sequence[Pass], names: Iterable[str]) -> list[Weight] | None:
    """Return the named weights as these passes will leave them; None when a pass decides while it runs.

    So a format that cannot hold a scheme is refused before a calibration that may take hours. Facts that only rounding
    shows (whether float16 holds the scales, whether a zero point is 0) are assumed to fit; export checks them again.
    """
    found: dict[str, Weight] = {}
    for made in passes:
        if isinstance(made, QuantizeWeights):
            found = _layers_of_pass(made, model) | found  # a weight that is quantized is left alone by what follows
        elif not made.keeps_schemes:
            return None
    plain = {name: _plain(model, name) for name in names if name not in found}
    weights = {name: found.get(name) or plain[name] for name in dict.fromkeys([*names, *found])}
    return None if None in weights.values() else [weight for weight in weights.values() if weight is not None]


def _layers_of_pass(made: QuantizeWeights, model: ir.Model) -> dict[str, Weight]:
    layers: dict[str, Weight] = {}
    for (weight, scheme), sites in made.plan(model).items():
        name, shape = weight.name or "", weight.shape
        assert shape is not None
        if name == EMBEDDING and all(site.role == "head" for site in sites):
            name = HEAD  # a tied head that is quantized otherwise than the table gets a tensor of its own
        rows, columns = (int(size) for size in shape.numpy())
        layers[name] = QuantizedLayer(name, _facts((rows, columns), scheme), _no_codes)
    return layers


def _facts(shape: tuple[int, int], scheme: Scheme) -> LayerFacts:
    middle = scheme.bits if scheme.symmetric else scheme.bits + 1
    group_size = min(scheme.block_columns(shape[1]), shape[1])
    return LayerFacts(
        shape=shape,
        bits=scheme.bits,
        kind="integer",
        group_size=group_size,
        strategy="channel" if group_size == shape[1] else "group",
        bits_for={
            "middle": middle if middle <= MAX_BITS else None,
            "from zero": scheme.bits,
            "from one": scheme.bits,
        },
        not_integers="",
        act_order=False,
        minima=False,
        float16_scales=True,
        float16_range=True,
        q4_1=True,
    )


def _plain(model: ir.Model, name: str) -> PlainWeight | None:
    """Return the named initializer; None for a weight that the checkpoint holds quantized."""
    value = model.graph.initializers.get(name)
    return None if value is None or value.const_value is None else PlainWeight(name, value.const_value)


def _no_codes() -> NoReturn:
    raise AssertionError("passes have not made the codes of this layer yet")


@dataclass(frozen=True)
class CheckpointWeights:
    """weights: in the order they are written. left_out: the checkpoint's other tensors, as sentences for the user."""

    weights: Sequence[Weight]
    left_out: Sequence[str]


def weights_of_checkpoint(checkpoint: Checkpoint) -> CheckpointWeights:
    """Return every tensor that the model needs, or all tensors when Ingot does not know the model's family.

    Each weight is read once, a quantized one for its facts. CheckpointError when tensors are missing, damaged, not
    finite or left over.
    """
    names = _names(checkpoint)
    checkpoint.check_finite([name for name in names if _is_float(checkpoint, name)])
    weights: list[Weight] = []
    values = EncodedValues(checkpoint.quantization)
    for done, name in enumerate(names, start=1):
        encoded = checkpoint.encoded.get(name)
        weights.append(
            _decoded(encoded, values) if encoded else PlainWeight(name, stored_tensor(checkpoint.tensor(name)))
        )
        report_progress("reading weights", done, len(names))
    values.note_warnings()
    return CheckpointWeights(weights, _left_out([name for name in checkpoint.shapes if name not in set(names)]))


def _is_float(checkpoint: Checkpoint, name: str) -> bool:
    return name in checkpoint.tensors and checkpoint.tensors[name].dtype in WEIGHT_DTYPES


def _left_out(names: Sequence[str]) -> list[str]:
    biases = sorted(name for name in names if name.endswith(".bias"))
    found = [f"{name}, which is computed or a copy" for name in names if name not in biases]
    return found + ([f"{len(biases)} biases of zeros, {biases[0]} the first"] if biases else [])


def _names(checkpoint: Checkpoint) -> Sequence[str]:
    family = checkpoint.config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        return list(checkpoint.shapes)
    return check_tensors(checkpoint, read_config(checkpoint))


def _decoded(tensor: EncodedTensor, values: EncodedValues) -> Weight:
    content = values.read(tensor)
    if isinstance(content, DecodedWeight):
        read = partial(_read, tensor)
        return QuantizedLayer(tensor.name, facts_of(content), read, tensor.activations, tensor.storage, tensor.parts)
    dtype = WEIGHT_DTYPES.get(tensor.storage, ir.DataType.FLOAT)
    return PlainWeight(tensor.name, lazy_tensor(tensor.name, dtype, tensor.shape, partial(_floats, tensor, dtype)))


def _read(tensor: EncodedTensor) -> DecodedWeight:
    content = tensor.read()
    assert isinstance(content, DecodedWeight)
    return content


def _floats(tensor: EncodedTensor, dtype: ir.DataType) -> NDArray[np.generic]:
    return tensor.dequantize().astype(dtype.numpy())
