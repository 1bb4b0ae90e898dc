"""deinterleave-rotary: the same logits in halves, weights in their own types, refusals that leave both rotations."""

import logging

import numpy as np
import onnx_ir as ir
import pytest

from ingot.passes.manager import PassManager
from ingot.passes.registry import make_pass
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.model.importer import import_checkpoint
from tests.each_case import each_case
from tests.parity import CHECKPOINTS, LOGITS, compare, load_logits
from tests.reference_runner import ReferenceRunner
from tests.tolerances import within

FAMILIES = ("cohere2", "ernie4_5", "glm4", "helium", "deepseek_v3", "mistral4")
QUANTIZED = {"bits": 4, "block_size": 16, "symmetric": False}


def imported(name: str, *passes: tuple[str, dict[str, object]]) -> ir.Model:
    model = import_checkpoint(Checkpoint.open(CHECKPOINTS / name))
    PassManager([make_pass(*entry) for entry in passes]).run(model)
    return model


def interleaved(model: ir.Model) -> list[int]:
    return [node.attributes.get_int("interleaved", 0) for node in model.graph if node.op_type == "RotaryEmbedding"]


@each_case("before", [(), (("pack-projections", {}),), (("quantize-weights", QUANTIZED),)], ids=str)
@each_case("name", FAMILIES)
def test_halves_have_the_logits_of_neighbours(name: str, before: tuple[tuple[str, dict[str, object]], ...]) -> None:
    tokens, _ = load_logits(CHECKPOINTS / name / LOGITS)
    model = imported(name, *before)
    expected = ReferenceRunner(model.clone()).run_ragged(tokens)
    types = {key: value.const_value.dtype for key, value in model.graph.initializers.items() if value.const_value}
    assert set(interleaved(model)) == {1}
    again = [PassManager([make_pass("deinterleave-rotary")]).run(model)[0].modified for _ in range(2)]
    assert again == [True, False]
    assert set(interleaved(model)) == {0}
    assert all(
        value.const_value.dtype == types[key] for key, value in model.graph.initializers.items() if value.const_value
    )
    parity = compare(ReferenceRunner(model).run_ragged(tokens), expected)
    assert within("parity.float32", parity.worst, name, max(1.0, parity.largest / 4))


def test_rows_of_the_second_half_come_from_odd_rows() -> None:
    model, name = imported("helium"), "model.layers.0.self_attn.k_proj.weight"
    stored = model.graph.initializers[name].const_value
    assert stored is not None
    before = np.array(stored.numpy())
    PassManager([make_pass("deinterleave-rotary")]).run(model)
    changed = model.graph.initializers[name].const_value
    assert changed is not None
    order = [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15]  # two heads of 8
    assert np.array_equal(np.array(changed.numpy()), before[order])


def test_a_key_that_another_node_reads_leaves_both_rotations(caplog: pytest.LogCaptureFixture) -> None:
    model = imported("helium")
    gemm = next(node for node in model.graph if node.name == "layers.1.self_attn.k_proj")
    copy = ir.node("Identity", [gemm.outputs[0]], name="copy")
    model.graph.insert_after(gemm, copy)
    with caplog.at_level(logging.INFO, "ingot.passes"):
        make_pass("deinterleave-rotary")(model)
    assert interleaved(model) == [0, 0, 1, 1]
    assert "'layers.1.self_attn.k_rope' rotates a value that others read too" in caplog.text
