"""Facts of a pruned model: counted from the checkpoint over several prunings; model and KV facts follow."""

import onnx_ir as ir
import pytest

from ingot.artifact import KVGeometry
from ingot.errors import PassError
from ingot.passes.model_facts import KV, WeightFacts
from ingot.passes.pruned_facts import MASKS_FACTS, STRUCTURE_FACTS, record_structure, refuse_to_fill_zeros
from tests.passes.tiny_decoder import HEAD_DIM, HEADS, KV_HEADS, TinyDecoder


def site(kept: int, kind: str = "ffn") -> dict[str, object]:
    return {"name": "layers.0.down_proj", "kind": kind, "kept": kept, "of": 172}


def test_a_second_pruning_counts_layers_from_the_checkpoint_and_adds_its_sites() -> None:
    model = TinyDecoder().model
    KV.record(model, KVGeometry(num_layers=5, num_kv_heads=4, head_dim=HEAD_DIM))
    record_structure(model, [0, 2, 4], [0.5, 0.1, 0.4, 0.2, 0.3], [site(128), site(1, "kv_groups")], removed=0)
    record_structure(model, [0, 2], [], [site(64)], removed=0)
    facts = STRUCTURE_FACTS.of(model)
    assert facts.layers == (0, 4)
    assert facts.influence == (0.5, 0.1, 0.4, 0.2, 0.3)
    assert facts.intermediate_sizes == (64,)
    assert [one["kept"] for one in facts.sites] == [128, 1, 64]
    assert (facts.num_heads, facts.num_kv_heads, facts.head_dim) == (HEADS, KV_HEADS, HEAD_DIM)
    assert KV.of(model) == KVGeometry(num_layers=2, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM)


def test_a_pruned_model_keeps_the_windows_of_the_layers_that_are_left() -> None:
    model = TinyDecoder().model
    KV.record(model, KVGeometry(num_layers=4, num_kv_heads=4, head_dim=HEAD_DIM, window=(0, 8, 8, 0)))
    record_structure(model, [0, 2], [], [], removed=0)
    assert KV.of(model) == KVGeometry(num_layers=2, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, window=(0, 8))


def test_layers_that_share_keys_and_values_are_refused() -> None:
    model = TinyDecoder().model
    KV.record(model, KVGeometry(num_layers=3, num_kv_heads=4, head_dim=HEAD_DIM, shares=(0, 0, 2)))
    with pytest.raises(PassError, match="layers that share keys and values; only layers of one shape can be pruned"):
        record_structure(model, [0, 2], [], [], removed=0)


def test_layers_of_different_heads_are_refused() -> None:
    model = TinyDecoder().model
    model.graph.node("layers.1.attention").attributes["num_heads"] = ir.AttrInt64("num_heads", 2)
    message = r"different heads \[\(2, 2, 16\), \(4, 2, 16\)\]; the KV cache has one shape"
    with pytest.raises(PassError, match=message):
        record_structure(model, [0, 1], [], [], removed=0)
    assert not STRUCTURE_FACTS.is_in(model)


def test_zeros_of_prune_weights_may_not_be_filled() -> None:
    model = TinyDecoder().model
    refuse_to_fill_zeros(model)
    MASKS_FACTS.record(model, WeightFacts([]))
    with pytest.raises(PassError, match="the zeros that prune-weights made would be lost"):
        refuse_to_fill_zeros(model)
