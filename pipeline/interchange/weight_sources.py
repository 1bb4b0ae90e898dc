"""The weights of a compiled model as an export sees them: the checkpoint's own tensors, or codes with their scales.

What the weights of an export will be, as far as it is known before anything is quantized.

A format that has no place for a scheme can so be refused before a calibration that takes hours. What only the rounding
shows (whether float16 holds the scales, whether a zero point is 0) is taken to be as the format likes it; it is checked
again on the weights themselves.

A checkpoint's weights as the writers of formats take them, straight from its files: no IR, no change of a value.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.errors import ConfigError, UsageError
from ingot.passes.base import Pass
from ingot.passes.numerics.scale_search import Scheme
from ingot.passes.quantization.activation_plan import split_layers
from ingot.passes.quantization.channel_folds import INPUT_SCALE
from ingot.passes.quantization.quantize_weights import QuantizeWeights
from ingot.passes.quantization.quantized_tensors import weight_bits
from ingot.passes.weights import apply_to_array
from ingot.pipeline.checkpoint.checkpoint import WEIGHT_DTYPES, Checkpoint
from ingot.pipeline.checkpoint.config import read_config
from ingot.pipeline.checkpoint.formats.activations import ActivationScheme, activations_of_node
from ingot.pipeline.checkpoint.formats.decoded import DecodedWeight, EncodedTensor
from ingot.pipeline.checkpoint.formats.exact_forms import MAX_BITS
from ingot.pipeline.checkpoint.tensors import EMBEDDING, HEAD, check_tensors
from ingot.pipeline.interchange.folder import lazy_tensor, stored_tensor
from ingot.pipeline.interchange.layers import LayerFacts, PlainWeight, QuantizedLayer, Weight, facts_of
from ingot.progress import report_progress

_CODE_TYPES = {
    ir.DataType.INT4: np.int8,
    ir.DataType.INT8: np.int8,
    ir.DataType.UINT4: np.uint8,
    ir.DataType.UINT8: np.uint8,
    ir.DataType.FLOAT8E4M3FN: np.float32,
}


def weights_of_model(model: ir.Model, names: Iterable[str]) -> dict[str, Weight]:
    """The named weights of a model that no pass but quantization has changed, and a tied head's own copy if any.

    Every quantized weight is read once for its facts. UsageError when layers keep channels aside or scale inputs.
    """
    _refuse_split_layers(model.graph)
    _refuse_input_scales(model.graph)
    initializers = model.graph.initializers
    copies = [name for name in (HEAD,) if name in initializers or f"{name}.q" in initializers]
    found = {name: _exported(initializers, name) for name in dict.fromkeys([*names, *copies])}
    if _is_heads_alone(initializers):  # the codes of a tied head bear the table's name
        found |= {EMBEDDING: PlainWeight(EMBEDDING, _tensor(initializers[EMBEDDING]))}
        found[HEAD] = _exported(initializers, EMBEDDING, HEAD)
    return found


def _is_heads_alone(initializers: Mapping[str, ir.Value]) -> bool:
    """Whether the codes of the embedding table are a tied head's, and the table itself is not quantized."""
    if f"{EMBEDDING}.q" not in initializers or EMBEDDING not in initializers:
        return False
    node = next(iter(initializers[f"{EMBEDDING}.q"].consumers()))
    return all(reader.op_type != "Gather" for reader in node.outputs[0].consumers())


def _refuse_split_layers(graph: ir.Graph) -> None:
    split = split_layers(graph)
    if split:
        raise UsageError(
            f"{split[0]!r} and {len(split) - 1} more layers keep outlier channels beside their 8-bit inputs; no "
            "checkpoint format has a place for them: set outliers and outlier_threshold to 0, or export to onnx"
        )


def _refuse_input_scales(graph: ir.Graph) -> None:
    scaled = [name.removesuffix(INPUT_SCALE) for name in graph.initializers if name.endswith(INPUT_SCALE)]
    if scaled:
        raise UsageError(
            f"{scaled[0]!r} and {len(scaled) - 1} more layers have their inputs scaled by a Mul; no checkpoint "
            "format has a place for it: give awq `fold: exact`, or export to onnx"
        )


def _exported(initializers: Mapping[str, ir.Value], name: str, exported_as: str | None = None) -> Weight:
    if f"{name}.q" not in initializers:
        return PlainWeight(name, _tensor(initializers[name]))
    node = next(iter(initializers[f"{name}.q"].consumers()))
    read = partial(_read_codes, node)
    return QuantizedLayer(exported_as or name, facts_of(read()), read, _activations(node))


def _activations(node: ir.Node) -> ActivationScheme | None:
    """How the linear layer behind a weight's DequantizeLinear has its inputs quantized."""
    reader = next(iter(node.outputs[0].consumers()))
    maker = None if reader.op_type != "Gemm" or reader.inputs[0] is None else reader.inputs[0].producer()
    return None if maker is None else activations_of_node(maker.metadata_props)


def _read_codes(node: ir.Node) -> DecodedWeight:
    """The operands of a DequantizeLinear."""
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
    """The named weights as these passes will leave an imported model's; None where a pass decides as it runs."""
    found: dict[str, Weight] = {}
    for made in passes:
        if isinstance(made, QuantizeWeights):
            found = _layers(made, model) | found  # a weight that is quantized is left alone by what follows
        elif not made.keeps_schemes:
            return None
    plain = {name: _plain(model, name) for name in names if name not in found}
    weights = {name: found.get(name) or plain[name] for name in dict.fromkeys([*names, *found])}
    return None if None in weights.values() else [weight for weight in weights.values() if weight is not None]


def _layers(made: QuantizeWeights, model: ir.Model) -> dict[str, Weight]:
    layers: dict[str, Weight] = {}
    for (weight, scheme), sites in made.plan(model).items():
        name, shape = weight.name or "", weight.shape
        assert shape is not None
        if name == EMBEDDING and all(site.role == "head" for site in sites):
            name = HEAD  # a tied head that is quantized otherwise than the table gets a tensor of its own
        rows, columns = (int(size) for size in shape.numpy())
        layers[name] = QuantizedLayer(name, _facts((rows, columns), scheme), _not_made)
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
        q4_1=True,
    )


def _plain(model: ir.Model, name: str) -> PlainWeight | None:
    """None for a weight that came quantized."""
    value = model.graph.initializers.get(name)
    return None if value is None or value.const_value is None else PlainWeight(name, value.const_value)


def _not_made() -> NoReturn:
    raise AssertionError("a planned layer has no codes yet")


@dataclass(frozen=True)
class SourceWeights:
    """weights in the order they are written; left_out says what of the checkpoint is not among them."""

    weights: Sequence[Weight]
    left_out: Sequence[str]


def weights_of_checkpoint(checkpoint: Checkpoint) -> SourceWeights:
    """Every tensor that the model needs; all there are when Ingot does not know the model's family.

    Each quantized layer is read once for its facts. CheckpointError when tensors are missing, damaged or left over.
    """
    names = _names(checkpoint)
    weights: list[Weight] = []
    for done, name in enumerate(names, start=1):
        encoded = checkpoint.encoded.get(name)
        weights.append(_decoded(encoded) if encoded else PlainWeight(name, stored_tensor(checkpoint.tensor(name))))
        report_progress("reading weights", done, len(names))
    return SourceWeights(weights, _left_out([name for name in checkpoint.shapes if name not in set(names)]))


def _left_out(names: Sequence[str]) -> list[str]:
    biases = sorted(name for name in names if name.endswith(".bias"))
    found = [f"{name}, which is computed or a copy" for name in names if name not in biases]
    return found + ([f"{len(biases)} biases of zeros, {biases[0]} the first"] if biases else [])


def _names(checkpoint: Checkpoint) -> Sequence[str]:
    try:
        config = read_config(checkpoint)
    except ConfigError:
        return list(checkpoint.shapes)
    return check_tensors(checkpoint, config)


def _decoded(tensor: EncodedTensor) -> Weight:
    content = tensor.read()
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
