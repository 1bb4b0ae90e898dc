"""Facts of the IR's recurrent ops as programs have them, and the side state that a model keeps for a sequence."""

import onnx_ir as ir

from ingot.artifact import KVGeometry
from ingot.artifact.programs.recurrent import ConvolutionFacts, DeltaRuleFacts, RecurrentFacts, ScanFacts, place_states
from ingot.errors import PassError
from ingot.passes.recurrent_ops import CONVOLUTION, DELTA_RULE, SCAN, delta_rule_of, recurrent_nodes, scan_of
from ingot.passes.weights import is_stored

_STORED = {CONVOLUTION: (1, 2), DELTA_RULE: (), SCAN: (4, 5)}  # operands that are weights


def recurrent_facts(node: ir.Node) -> RecurrentFacts:
    """Sizes of a recurrent op. PassError for those that no kernel computes."""
    layer = node.attributes["layer"].as_int()
    try:
        if node.op_type == CONVOLUTION:
            assert node.inputs[1] is not None
            assert node.inputs[1].shape is not None
            channels, taps = node.inputs[1].shape.numpy()
            activation = node.attributes["activation"].as_string() or "none"
            sizes = {"layer": layer, "channels": int(channels), "taps": int(taps), "activation": activation}
            return ConvolutionFacts.model_validate(sizes)
        if node.op_type == DELTA_RULE:
            return DeltaRuleFacts(layer=layer, **vars(delta_rule_of(node)))
        return ScanFacts(layer=layer, **vars(scan_of(node)))
    except ValueError as error:
        raise PassError(f"{node.name!r} ({node.op_type}) has sizes that the kernels do not compute: {error}") from error


def require_stored_operands(node: ir.Node) -> None:
    """Raise PassError for a weight of a recurrent op that is computed."""
    for index in _STORED[node.op_type]:
        value = node.inputs[index] if index < len(node.inputs) else None
        if value is not None and not is_stored(value):
            raise PassError(
                f"{node.name!r} ({node.op_type}) reads {value.name!r}, which is computed; put fold-constants before the"
                " lowering"
            )


def with_states(kv: KVGeometry, graph: ir.Graph) -> KVGeometry:
    """The geometry with the side state of the graph's recurrent ops."""
    parts, size = place_states(recurrent_facts(node) for node in recurrent_nodes(graph))
    return kv.model_copy(update={"state": parts, "state_bytes": size}) if parts else kv
