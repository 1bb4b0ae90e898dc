"""Mixtures of experts that the native engine's operation does not compute are refused with the node's name."""

import numpy as np
import onnx_ir as ir
import pytest

from ingot.artifact.programs.cpu_program import Experts
from ingot.errors import PassError
from ingot.passes.rewriting import add_constant
from ingot.pipeline.targets.cpu.lowering import lower_to_operations
from tests.each_case import each_case
from tests.parity import CHECKPOINTS
from tests.simulators.cpu_programs import LOWERING, imported, lowered


def mixture() -> ir.Model:
    return imported(CHECKPOINTS / "qwen3_moe", "fold-constants")


def scale_input(model: ir.Model, *names: str) -> None:
    """Put a Mul in front of linear layers that read one value."""
    layers = [node for node in model.graph if node.name in names]
    x = layers[0].inputs[0]
    assert x is not None
    scaled = ir.node("Mul", [x, add_constant(model.graph, "half", np.array(0.5, np.float32))], name="scaled")
    scaled.outputs[0].name, scaled.outputs[0].type, scaled.outputs[0].shape = "scaled", x.type, x.shape
    model.graph.insert_before(layers[0], scaled)
    for layer in layers:
        layer.replace_input_with(0, scaled.outputs[0])


def test_a_layer_of_experts_is_one_operation_that_norms_and_adds() -> None:
    (operation,) = (one for one in lowered(mixture()).program.operations if isinstance(one, Experts))
    assert (len(operation.up), operation.chosen, operation.adds) == (6, 3, True)
    assert operation.norm is not None


@each_case("family", ["qwen3_moe", "gpt_oss"])
def test_experts_that_are_apart_read_and_make_values_of_their_own_for_every_token(family: str) -> None:
    model = imported(CHECKPOINTS / family, "fold-constants", *LOWERING)
    program = lower_to_operations(model, experts_apart=True).program
    found = [one for one in program.operations if isinstance(one, Experts)]
    assert found
    for one in found:
        assert (one.norm, one.adds, one.rows) == (None, False, "tokens")
        assert {program.buffers[view.buffer].rows for view in one.views} == {"tokens"}


def test_inputs_of_one_experts_own_are_refused() -> None:
    model, path = mixture(), "layers.0.mlp.experts.2"
    scale_input(model, f"{path}.gate_proj", f"{path}.up_proj")
    with pytest.raises(PassError, match=r"'layers.0.mlp.combine' .* has an expert with inputs of its own"):
        lowered(model)


def test_another_down_projection_is_refused() -> None:
    model = mixture()
    scale_input(model, "layers.0.mlp.experts.2.down_proj")
    with pytest.raises(PassError, match=r"'layers.0.mlp.combine' .* adds experts other than down"):
        lowered(model)
