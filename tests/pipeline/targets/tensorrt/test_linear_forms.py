"""Forms of linear layers: static scales, refusals."""

import pytest
from benchmarks.programs.segment_numerics import random_feeds, relative_errors

from ingot.errors import PassError
from ingot.passes.manager import PassManager
from ingot.passes.numerics.activation_rounding import ActivationScheme, Kind
from ingot.passes.quantization.activation_nodes import insert_activation_quantization
from ingot.passes.registry import make_pass
from ingot.passes.weights import weight_sites
from tests.pipeline.targets.tensorrt.models import CHANNEL, prepared, segments_of
from tests.tolerances import within


@pytest.mark.parametrize("kind", ["int", "float"])
def test_a_static_scale_is_an_input_so_that_layers_share_a_plan(kind: Kind) -> None:
    model = prepared()
    linears = [site.node for site in weight_sites(model) if site.role == "linear"]
    for number, gemm in enumerate(linears):
        source = gemm.inputs[0]
        assert source is not None
        insert_activation_quantization(model.graph, source, [gemm], ActivationScheme(kind, 0.01 + 0.001 * number))
    weights = (
        ("quantize-weights", {**CHANNEL, "symmetric": True}) if kind == "int" else ("fp8", {"activations": "none"})
    )
    PassManager([make_pass(*weights)]).run(model)
    segments = segments_of(model)
    layer = segments[1]
    assert "layers.0.mlp.down_proj.input.dequantize.inverse" in layer.weights
    assert layer.model.graph.num_nodes() == segments[2].model.graph.num_nodes()
    worst = max(relative_errors(layer, random_feeds(layer, 3)).values())
    assert within("segments.activations", worst, f"static {kind}")


def test_a_computed_weight_is_refused_by_name() -> None:
    model = prepared()
    gemm = next(node for node in model.graph if node.name == "layers.0.mlp.down_proj")
    source = next(node for node in model.graph if node.name == "layers.0.mlp.gated")
    gemm.replace_input_with(1, source.outputs[0])
    with pytest.raises(PassError, match=r"'layers.0.mlp.down_proj' multiplies by 'layers.0.mlp.gated', which is comp"):
        segments_of(model)
