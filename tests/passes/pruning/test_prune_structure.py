"""prune-structure: removes what matters least, shrinks all shapes, and refuses bad requests by name."""

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from ingot.errors import PassError, UsageError
from ingot.passes.calibration import calibrate_with
from ingot.passes.fusion.fold_constants import FoldConstants
from ingot.passes.fusion.fuse_residual_norm import FuseResidualNorm
from ingot.passes.fusion.pack_projections import PackProjections
from ingot.passes.manager import PassManager
from ingot.passes.pruned_facts import STRUCTURE_FACTS, StructureFacts
from ingot.passes.pruning.prune_structure import PruneStructure
from ingot.passes.quantization.gptq import Gptq
from ingot.passes.quantization.quantize_weights import QuantizeWeights
from tests.passes.calibration_data import calibration
from tests.passes.tiny_decoder import HEAD_DIM, HIDDEN, INNER, TinyDecoder, array

DOWN, GATE, UP = (f"layers.0.{name}_proj.weight" for name in ("down", "gate", "up"))
DEAD = np.arange(3, INNER, 4)  # neurons whose column of down is almost nothing


def decoder(*before: Any, layers: int = 2) -> ir.Model:
    """The tiny decoder; every fourth neuron of each feed-forward, and KV head 1 of layer 0, do almost nothing."""
    model = TinyDecoder(layers=layers).model
    for name, value in model.graph.initializers.items():
        if name.endswith("down_proj.weight") or name == "layers.0.o_proj.weight":
            values = array(model, name).copy()
            values[:, DEAD if "down" in name else slice(32, 64)] *= 1e-4
            value.const_value = ir.tensor(values, name=name)
    PassManager([FoldConstants(), *before]).run(model)
    return model


def pruned(model: ir.Model, *after: Any, **options: Any) -> ir.Model:
    with calibrate_with(calibration()):
        PassManager([PruneStructure(**options), *after]).run(model)
    return model


def facts(model: ir.Model) -> StructureFacts:
    return STRUCTURE_FACTS.of(model)


def logits(model: ir.Model) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.concatenate(list(calibration().logits(model)))


def lost(model: ir.Model, exact: ir.Model) -> float:
    expected = logits(exact)
    return float(np.linalg.norm(logits(model) - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("refit", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_idle_neurons_are_removed_and_all_else_stays(packed: bool, refit: bool) -> None:
    before = [PackProjections()] if packed else []
    model = pruned(decoder(*before), ffn=INNER - len(DEAD), refit=refit)
    assert lost(model, decoder()) < 1e-3
    assert array(model, DOWN).shape == (HIDDEN, INNER - len(DEAD))
    if packed:
        assert array(model, "layers.0.gate_up_proj.weight").shape == (2 * (INNER - len(DEAD)), HIDDEN)
    else:
        kept = np.delete(np.arange(INNER), DEAD)
        np.testing.assert_array_equal(array(model, GATE), array(decoder(), GATE)[kept].astype(np.float32))
        np.testing.assert_array_equal(array(model, UP), array(decoder(), UP)[kept].astype(np.float32))
    assert facts(model).intermediate_sizes == (INNER - len(DEAD),)


@pytest.mark.parametrize("packed", [True, False])
def test_a_kv_head_is_removed_with_its_query_heads(packed: bool) -> None:
    before = [PackProjections()] if packed else []
    model = pruned(decoder(*before), kv_groups=1)
    attention = next(node for node in model.graph if node.op_type == "PagedAttention")
    assert [attention.attributes[name].as_int() for name in ("num_heads", "num_kv_heads", "head_dim")] == [
        2,
        1,
        HEAD_DIM,
    ]
    assert array(model, "layers.0.o_proj.weight").shape == (HIDDEN, 2 * HEAD_DIM)
    if not packed:
        expected = array(decoder(), "layers.0.k_proj.weight")[:HEAD_DIM].astype(np.float32)
        np.testing.assert_array_equal(array(model, "layers.0.k_proj.weight"), expected)
        assert len(array(model, "layers.0.q_proj.bias")) == 2 * HEAD_DIM
    rotary = [node for node in model.graph if node.op_type == "RotaryEmbedding"]
    assert sorted({node.attributes["num_heads"].as_int() for node in rotary}) == [1, 2]
    assert np.isfinite(logits(model)).all()
    first = facts(model).sites[0]
    assert (first["kind"], first["kept"], first["of"]) == ("kv_groups", 1, 2)
    assert first["output_error"] < 1e-3


def test_the_layer_of_least_influence_is_removed_and_the_others_are_renumbered() -> None:
    model = decoder(layers=4)
    for name in ("layers.1.o_proj.weight", "layers.1.down_proj.weight"):
        value = model.graph.initializers[name]
        value.const_value = ir.tensor(array(model, name) * np.float16(0.001), name=name)
    exact, third = logits(model), array(model, "layers.3.q_proj.weight").copy()
    pruned(model, layers=3)
    assert facts(model).layers == (0, 2, 3)
    assert int(np.argmin(facts(model).influence)) == 1
    attentions = [node for node in model.graph if node.op_type == "PagedAttention"]
    assert [node.attributes["layer"].as_int() for node in attentions] == [0, 1, 2]
    assert [node.name for node in attentions] == [f"layers.{number}.attention" for number in range(3)]
    np.testing.assert_array_equal(array(model, "layers.2.q_proj.weight"), third)
    assert not [name for name in model.graph.initializers if name.startswith("layers.3.")]
    assert np.linalg.norm(logits(model) - exact) / np.linalg.norm(exact) < 0.01


def test_refitting_loses_less_than_cutting() -> None:
    errors = [lost(pruned(decoder(), ffn=0.5, kv_groups=0.5, refit=refit), decoder()) for refit in (True, False)]
    print(errors)
    assert errors[0] < errors[1]


def test_a_second_pruning_counts_from_the_first() -> None:
    model = pruned(decoder(layers=4), layers=3, ffn=128)
    first = facts(model).layers
    pruned(model, layers=2, ffn=64)
    assert set(facts(model).layers) < set(first)
    assert len(facts(model).layers) == 2
    assert facts(model).intermediate_sizes == (64,)
    assert array(model, DOWN).shape == (HIDDEN, 64)


@pytest.mark.parametrize("quantizer", [QuantizeWeights(), Gptq()])
def test_a_pruned_model_can_be_quantized(quantizer: Any) -> None:
    model = pruned(decoder(), PackProjections(), quantizer, ffn=0.75, kv_groups=1)
    assert array(model, "layers.0.down_proj.weight.q").shape == (HIDDEN, 128)
    assert np.isfinite(logits(model)).all()


def test_the_same_data_gives_the_same_choice() -> None:
    first, second = pruned(decoder(), ffn=0.5), pruned(decoder(), ffn=0.5)
    assert STRUCTURE_FACTS.of(first) == STRUCTURE_FACTS.of(second)
    np.testing.assert_array_equal(array(first, DOWN), array(second, DOWN))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": 3}, "layers is 3, but the number of layers is 2"),
        ({"ffn": 173}, "ffn is 173, but the number of inputs of 'layers.0.down_proj' is 172"),
        ({"kv_groups": 3}, "kv_groups is 3, but the number of KV heads of 'layers.0.o_proj' is 2"),
    ],
)
def test_keeping_more_than_there_is_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PassError, match=f"prune-structure: {message}; set"):
        pruned(decoder(), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ffn": 1.5}, "ffn is 1.5; allowed: 'all' or a whole number from 1 to .* or a number above 0, up to 1"),
        ({"layers": 0}, "layers is 0; allowed"),
        ({"kv_groups": -0.5}, "kv_groups is -0.5; allowed"),
        ({"ffn": 0.5, "damping": 0.0}, r"damping is 0\.0; allowed"),
        ({"ffn": 0.5, "multiple": 0}, "multiple is 0; allowed: a whole number from 1 to 65536"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        PruneStructure(**options)


def test_a_share_that_rounds_to_all_is_refused() -> None:
    with pytest.raises(PassError, match=r"kv_groups is 0.9, which keeps all 2 of 'layers.0.o_proj'; set it to less"):
        pruned(decoder(), kv_groups=0.9)


def test_keeping_every_layer_is_refused() -> None:
    with pytest.raises(PassError, match="layers is 2, which keeps all 2; set it to less"):
        pruned(decoder(), layers=2, ffn=0.5)


def test_quantized_and_fused_models_are_refused_by_name() -> None:
    with pytest.raises(PassError, match=r"layer 'layers.0.down_proj' has a weight that is computed or quantized"):
        pruned(decoder(QuantizeWeights()), ffn=0.5)
    with pytest.raises(PassError, match="run this pass before fuse-residual-norm"):
        pruned(decoder(FuseResidualNorm()), layers=1)


def test_a_pass_that_removes_nothing_is_refused() -> None:
    with pytest.raises(PassError, match='ffn, kv_groups and layers are all "all"; set one of them'):
        pruned(decoder())


def test_without_calibration_data_the_error_says_how_to_provide_it() -> None:
    with pytest.raises(PassError, match="prune-structure: needs calibration data"):
        PassManager([PruneStructure(ffn=0.5)]).run(decoder())
