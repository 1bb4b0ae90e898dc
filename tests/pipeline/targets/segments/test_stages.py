"""Stages of TensorRT: segments, kernels, and their order."""

import onnx_ir as ir
import pytest

from ingot.errors import PassError
from ingot.passes.manager import PassManager
from ingot.passes.registry import make_pass
from ingot.pipeline.targets.segments.stages import KernelStage, SegmentStage, split_stages
from ingot.pipeline.targets.tensorrt.segment_lowering import is_kernel, pack_attention_operands
from tests.pipeline.targets.tensorrt.models import prepared, segments_of


def kernels(checkpoint: str = "llama") -> list[str]:
    return [
        stage.node.name or "" if isinstance(stage, KernelStage) else "segment"
        for stage in split_stages(prepared(checkpoint=checkpoint).graph, is_kernel)
    ]


def test_gathers_and_attentions_are_kernels_with_one_segment_between_two_of_them() -> None:
    layers = [f"layers.{layer}.self_attn.attention" for layer in range(3)]
    between = [step for name in layers for step in ("segment", name)]
    assert kernels() == ["embed_tokens", *between, "segment", "wanted", "segment"]


def test_the_residual_stream_and_the_packed_projection_cross_between_stages() -> None:
    layer = segments_of(prepared())[1]
    assert {name: value.name for name, value in layer.inputs.items()} == {
        "x0": "layers.0.self_attn.attention",
        "x1": "embed_tokens",
    }
    assert [value.name for value in layer.outputs.values()] == ["layers.0.mlp.residual", "layers.1.self_attn.qkv_proj"]


def test_a_head_of_eight_bits_in_blocks_is_a_kernel() -> None:
    model = prepared()
    PassManager([make_pass("quantize-weights", {"block_size": 16, "symmetric": True, "lm_head": 8})]).run(model)
    last = split_stages(model.graph, is_kernel)[-1]
    assert isinstance(last, KernelStage)
    assert last.node.name == "lm_head"


def test_queries_and_keys_that_are_normed_are_packed_within_the_segment() -> None:
    stages = split_stages(prepared(checkpoint="qwen3").graph, is_kernel)
    attention = next(s.node for s in stages if isinstance(s, KernelStage) and s.node.op_type == "PagedAttention")
    assert len(set(attention.inputs[:3])) == 1
    packed = attention.inputs[0]
    assert packed is not None
    before = next(stage for stage in stages if isinstance(stage, SegmentStage))
    assert packed in before.outputs
    assert packed.name == "layers.0.self_attn.attention.operands"


def test_operands_in_another_order_of_a_wider_row_are_refused() -> None:
    model = prepared()
    attention = next(node for node in model.graph if node.op_type == "PagedAttention")
    attention.attributes["key_column"] = ir.AttrInt64("key_column", 0)
    with pytest.raises(PassError, match=r"'layers.0.self_attn.attention' reads columns of wider values"):
        pack_attention_operands(model.graph)
