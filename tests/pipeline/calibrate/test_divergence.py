"""The blocks that a divergence runs one after another, and the refusal without a reference model."""

import pytest

from ingot.errors import PassError
from ingot.pipeline.calibrate import CalibrationEngine
from ingot.pipeline.calibrate.divergence import blocks_of
from ingot.pipeline.calibrate.steps import shared_nodes
from tests.passes.calibration_data import calibration_data
from tests.passes.tiny_decoder import TinyDecoder


def test_the_graph_is_cut_where_one_value_is_live() -> None:
    graph = TinyDecoder(tied=False).model.graph
    shared = shared_nodes(graph)
    found = blocks_of(graph, shared)
    gemms = [[node.name for node in block.nodes if node.op_type == "Gemm"] for block in found]
    assert [len(names) for names in gemms] == [0, 4, 3, 4, 3, 1]
    assert [block.source for block in found[1:]] == [block.output for block in found[:-1]]
    assert found[-1].output is graph.outputs[0]
    nodes = [node for block in found for node in block.nodes]
    assert nodes == [node for node in graph if node not in shared], "each node is in one block"


def test_a_divergence_without_a_reference_model_is_refused() -> None:
    model = TinyDecoder(tied=False).model
    with pytest.raises(PassError, match="has no reference model"):
        with CalibrationEngine(calibration_data(4, 16)).divergence(model, [], 64):
            pass
