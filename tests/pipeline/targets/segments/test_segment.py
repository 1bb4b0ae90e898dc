"""A lowered segment: its name and the IR's layer numbers."""

from tests.pipeline.targets.tensorrt.models import prepared, segments_of


def test_a_message_gets_the_models_layer_numbers_back() -> None:
    layer = segments_of(prepared())[2]
    assert layer.with_original_layers("no form for 'layers.0.mlp.down_proj'") == "no form for 'layers.1.mlp.down_proj'"
    assert layer.name == "layers.2.self_attn.qkv_proj"
