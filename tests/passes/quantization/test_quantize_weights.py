"""quantize-weights: tensors and numbers before and after, options, refusals."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from ingot.errors import PassError, UsageError
from ingot.passes.manager import PassManager
from ingot.passes.printing import model_to_text
from ingot.passes.quantization.quantize_weights import QUANTIZATION_FACTS, QuantizeWeights
from ingot.passes.registry import make_pass
from ingot.progress import progress_to
from tests.passes.lowering.test_lower_onnxruntime_cpu import linear_model
from tests.passes.tiny_decoder import TinyDecoder, array


def statistics(model: ir.Model) -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entry in QUANTIZATION_FACTS.of(model).weights}


def node(model: ir.Model, name: str) -> ir.Node:
    return next(node for node in model.graph if node.name == name)


def test_a_gemm_reads_dequantized_blocks_and_the_source_weight_is_gone() -> None:
    model = TinyDecoder().model
    before = array(model, "layers.0.gate_proj.weight")
    (record,) = PassManager([QuantizeWeights()]).run(model)
    assert record.modified
    assert record.weight_bytes_after < 0.5 * record.weight_bytes_before
    names = model.graph.initializers.keys()
    assert not [name for name in names if name.endswith("proj.weight")]
    quantized = node(model, "layers.0.gate_proj.dequantize")
    assert [value and value.name for value in node(model, "layers.0.gate_proj").inputs][1] == quantized.outputs[0].name
    assert [value.name for value in quantized.inputs if value] == [
        f"layers.0.gate_proj.weight.{part}" for part in ("q", "scale", "zero_point")
    ]
    codes, scale, zero = (array(model, f"layers.0.gate_proj.weight.{part}") for part in ("q", "scale", "zero_point"))
    assert (codes.dtype.name, scale.shape, zero.dtype.name) == ("uint4", (172, 2), "uint4")
    steps, zeros = np.repeat(scale, 32, 1), np.repeat(zero.astype(np.float32), 32, 1)
    error = np.linalg.norm((codes.astype(np.float32) - zeros) * steps - before) / np.linalg.norm(before)
    assert error == pytest.approx(statistics(model)["layers.0.gate_proj"]["relative_error"], rel=1e-3)
    assert 0.05 < error < 0.09


def test_second_run_changes_nothing() -> None:
    model = TinyDecoder().model
    PassManager([QuantizeWeights()]).run(model)
    text, metadata = model_to_text(model), dict(model.metadata_props)
    (record,) = PassManager([QuantizeWeights()]).run(model)
    assert not record.modified
    assert (model_to_text(model), dict(model.metadata_props)) == (text, metadata)


@pytest.mark.parametrize(
    ("options", "dtype", "scale_shape", "attributes"),
    [
        ({"block_size": 32}, "uint4", (64, 6), {"axis": 1, "block_size": 32}),
        ({"block_size": 16, "symmetric": True}, "int4", (64, 11), {"axis": 1, "block_size": 16}),
        ({"bits": 8, "block_size": 256}, "uint8", (64, 1), {"axis": 1, "block_size": 256}),
        ({"bits": 8, "block_size": "channel", "symmetric": True}, "int8", (64,), {"axis": 0}),
        ({"block_size": 0}, "uint4", (64,), {"axis": 0}),
    ],
)
def test_layout_follows_the_options(
    options: Mapping[str, object], dtype: str, scale_shape: tuple[int, ...], attributes: dict[str, int]
) -> None:
    model = TinyDecoder().model
    PassManager([make_pass("quantize-weights", options)]).run(model)
    down = "layers.1.down_proj"  # 172 columns: the last block is partial
    assert array(model, f"{down}.weight.q").dtype.name == dtype
    assert array(model, f"{down}.weight.q").shape == (64, 172)
    assert array(model, f"{down}.weight.scale").shape == scale_shape
    made = node(model, f"{down}.dequantize")
    assert {name: made.attributes.get_int(name) for name in made.attributes} == attributes
    if not options.get("symmetric"):
        assert array(model, f"{down}.weight.zero_point").shape == scale_shape


def test_tied_table_and_head_share_one_tensor_when_their_settings_agree() -> None:
    model = TinyDecoder(tied=True).model
    PassManager([QuantizeWeights(lm_head=4, embedding=4)]).run(model)
    assert node(model, "lm_head").inputs[1] is node(model, "embed_tokens").inputs[0]
    assert "lm_head" not in statistics(model)


def test_tied_table_and_head_have_separate_copies_when_their_settings_differ() -> None:
    model = TinyDecoder(tied=True).model
    PassManager([QuantizeWeights(lm_head=4, embedding=8)]).run(model)
    assert array(model, "model.embed_tokens.weight.q").dtype.name == "uint8"
    assert array(model, "lm_head.weight.q").dtype.name == "uint4"
    assert statistics(model)["lm_head"]["tensor"] == "lm_head.weight.q"
    assert "model.embed_tokens.weight" not in model.graph.initializers


@pytest.mark.parametrize("tied", [True, False])
def test_none_leaves_table_and_head_as_they_are(tied: bool) -> None:
    model = TinyDecoder(tied=tied).model
    PassManager([QuantizeWeights(lm_head="none", embedding="none")]).run(model)
    assert array(model, "model.embed_tokens.weight").dtype == np.float16
    assert not {"lm_head", "embed_tokens"} & statistics(model).keys()


def test_a_sixteen_bit_table_gathered_before_the_cast_becomes_float_rows() -> None:
    decoder = TinyDecoder(tied=False)
    gather = node(decoder.model, "embed_tokens")
    cast = gather.inputs[0]
    assert cast is not None
    producer = cast.producer()
    assert producer is not None
    gather.replace_input_with(0, producer.inputs[0])
    gather.outputs[0].dtype = ir.DataType.FLOAT16
    decoder.model.graph.remove(producer, safe=True)
    PassManager([QuantizeWeights()]).run(decoder.model)
    assert gather.outputs[0].dtype == ir.DataType.FLOAT


def test_the_last_override_that_matches_wins() -> None:
    model = TinyDecoder(tied=False).model
    overrides = {
        "layers.*.down_proj": {"bits": 8, "block_size": "channel", "symmetric": True},
        "layers.1.*": "none",
        "layers.1.q_proj": {"block_size": 16},
        "*.o_proj.weight": {"symmetric": True},
        "lm_head": 16,
    }
    PassManager([make_pass("quantize-weights", {"overrides": overrides})]).run(model)
    found = statistics(model)
    assert (found["layers.0.down_proj"]["bits"], found["layers.0.down_proj"]["block_size"]) == (8, 0)
    assert found["layers.1.q_proj"]["block_size"] == 16
    assert found["layers.1.o_proj"]["symmetric"] is True
    assert not {"layers.1.down_proj", "layers.1.k_proj", "lm_head"} & found.keys()


def test_a_pass_with_overrides_prints_as_a_recipe_entry() -> None:
    made = QuantizeWeights(bits=8, overrides={"lm_head": "none"})
    assert str(made) == "quantize-weights: {bits: 8, overrides: {lm_head: none}}"


def test_progress_reaches_the_total() -> None:
    seen: list[tuple[int, int]] = []
    with progress_to(lambda what, done, total: seen.append((done, total))):
        PassManager([QuantizeWeights()]).run(TinyDecoder().model)
    assert seen[-1][0] == seen[-1][1]
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_a_pattern_that_matches_nothing_is_refused_with_the_nearest_names() -> None:
    with pytest.raises(PassError, match=r"'layers.0.qproj' matches no weight; the nearest are layers.0.q_proj"):
        PassManager([QuantizeWeights(overrides={"layers.0.qproj": "none"})]).run(TinyDecoder().model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 6}, r"bits is 6; allowed: 2 or 3 or 4 or 8"),
        ({"block_size": 24}, r"block_size is 24; allowed: 0 or 16"),
        ({"overrides": {"a": {"bitz": 4}}}, r"overrides\['a'\]: unknown key 'bitz'.*Did you mean 'bits'"),
        ({"overrides": {"a": {"bits": 5}}}, r"overrides\['a'\]: bits is 5; allowed: 2 or 3 or 4 or 8"),
        ({"overrides": {"a": "nothing"}}, r"overrides\['a'\] is 'nothing'; allowed"),
    ],
)
def test_wrong_options_are_refused(options: Mapping[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_pass("quantize-weights", options)


def test_a_weight_with_nan_is_refused_by_name() -> None:
    model = TinyDecoder().model
    array(model, "layers.1.up_proj.weight")[3, 5] = np.nan
    with pytest.raises(PassError, match=r"quantize-weights: weight 'layers.1.up_proj.weight' holds NaN"):
        PassManager([QuantizeWeights()]).run(model)


def test_a_gemm_of_another_form_is_refused() -> None:
    model = TinyDecoder().model
    node(model, "layers.0.q_proj").attributes["alpha"] = ir.AttrFloat32("alpha", 2.0)
    with pytest.raises(PassError, match=r"'layers.0.q_proj' is not x @ W.T \+ b: its alpha"):
        PassManager([QuantizeWeights()]).run(model)


def test_statistics_include_those_of_the_weight_and_its_codes() -> None:
    model = linear_model()
    QuantizeWeights(bits=4, block_size=32)(model)
    (row,) = QUANTIZATION_FACTS.of(model).weights
    assert {"scale_min", "scale_median", "scale_max", "outlier_share", "peak_over_rms", "end_share"} <= row.keys()
