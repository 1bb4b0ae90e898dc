"""Steps of a graph: each at most one linear layer deep, run in order, with one step of weights in memory."""

import weakref
from typing import Any

import pytest

from ingot.passes import weights as weight_values
from ingot.passes.fusion.pack_projections import PackProjections
from ingot.pipeline.calibrate import steps
from ingot.pipeline.calibrate.activations import MEMORY_BYTES, Activations
from ingot.pipeline.calibrate.steps import StepRunner, shared_nodes, steps_of
from tests.passes.calibration_data import calibration, calibration_data
from tests.passes.tiny_decoder import TinyDecoder


def test_stages_have_every_linear_layer_once_in_graph_order() -> None:
    model = TinyDecoder().model
    PackProjections()(model)
    seen = [node for stage in calibration().stages(model) for group in stage.groups for node in group.linears]
    assert seen == [node for node in model.graph if node.op_type == "Gemm"]


def test_at_most_one_step_of_weights_is_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[tuple[weakref.ref[Any], int]] = []
    most: list[int] = []

    def counted(value: Any) -> Any:
        result = engine_values(value)
        alive.append((weakref.ref(result), result.nbytes))
        most.append(sum(size for ref, size in alive if ref() is not None))
        return result

    engine_values = weight_values.float32_values
    monkeypatch.setattr(steps, "float32_values", counted)
    for stage in calibration().stages(TinyDecoder(layers=6).model):
        stage.gram(stage.groups[0].source)
    assert max(most) <= 2 * 172 * 64 * 4  # gate and up of one layer


def test_a_step_holds_the_linear_layers_that_can_run_next() -> None:
    graph = TinyDecoder().model.graph
    shared = shared_nodes(graph)
    assert {node.op_type for node in shared} == {"Unsqueeze", "Cast"}
    found = steps_of(graph, shared)
    groups = [[[node.name for node in group.linears] for group in step.groups] for step in found]
    assert groups[:3] == [[], [["layers.0.q_proj", "layers.0.k_proj", "layers.0.v_proj"]], [["layers.0.o_proj"]]]
    assert (len(groups), groups[-1]) == (10, [["lm_head"]])
    nodes = [node for step in found for node in step.nodes]
    assert len(nodes) == len(set(nodes))
    assert {*nodes, *shared} == set(graph)


def test_chunks_are_spread_evenly_over_the_data() -> None:
    data = calibration_data(sequences=40, tokens=512)
    with Activations(MEMORY_BYTES) as store:
        runner = StepRunner(data, TinyDecoder().model.graph, store)
        chunks = len(runner.chunks)
        assert chunks > 4
        assert runner.spread_chunks(data.tokens) == list(range(chunks))
        assert runner.spread_chunks(data.tokens * 2 // chunks) == [0, chunks // 2]
        assert runner.spread_chunks(1) == [0]
