"""Weights that a program's nodes read: their names, bytes and rows, and operands that are refused."""

import numpy as np
import onnx_ir as ir
import pytest

from ingot.errors import UsageError
from ingot.passes.manager import PassManager
from ingot.passes.registry import make_pass
from ingot.pipeline.targets.segments.split import split_program
from ingot.pipeline.targets.segments.weight_operands import (
    Codes,
    Operand,
    read_operands,
    require_known,
    weight_bytes,
)
from ingot.pipeline.targets.table import TARGETS
from tests.passes.tiny_decoder import HIDDEN, VOCAB, TinyDecoder

QUANTIZED = {"bits": 4, "block_size": 32, "lm_head": 4, "embedding": 4}


def segments(**quantize: object) -> list[ir.Model]:
    """The segments of a tied decoder for the target cpu."""
    model = TinyDecoder(tied=True).model
    passes = [make_pass("quantize-weights", quantize)] if quantize else []
    PassManager([*passes, *map(make_pass, TARGETS["cpu"].lowering)]).run(model)
    return list(split_program(model)[1])


def operands(models: list[ir.Model]) -> list[Operand]:
    return [found for model in models for node in model.graph for found in read_operands(node, lambda _: HIDDEN)]


@pytest.mark.parametrize("quantize", [{}, QUANTIZED], ids=["float", "int4"])
def test_every_weight_is_read_by_its_name_in_the_checkpoint(quantize: dict[str, object]) -> None:
    read = {found.name for found in operands(segments(**quantize))}
    wanted = {name for name in TinyDecoder(tied=True).model.graph.initializers if name.endswith((".weight", ".bias"))}
    assert wanted <= read


def test_some_rows_of_a_quantized_weight_decode_to_the_rows_of_the_whole() -> None:
    found = [one for one in operands(segments(**QUANTIZED)) if isinstance(one.content, Codes)]
    assert {one.op_type for one in found} == {"MatMulNBits", "GatherBlockQuantized"}
    for one in found:
        assert isinstance(one.content, Codes)
        whole = one.content.decode(slice(None)).dequantize()
        assert whole.shape[0] == one.rows
        np.testing.assert_array_equal(one.content.decode(slice(3, 9)).dequantize(), whole[3:9])


def test_a_table_that_is_also_the_head_counts_once() -> None:
    name = "model.embed_tokens.weight"
    models = segments(**QUANTIZED)
    readers = [found for found in operands(models) if found.name == name]
    assert [found.op_type for found in readers] == ["GatherBlockQuantized", "MatMulNBits"]
    assert len({found.stored for found in readers}) == 1
    codes, blocks = VOCAB * HIDDEN // 2, VOCAB * HIDDEN // 32
    assert weight_bytes(models)[f"{name}.q"] == codes + 4 * blocks + blocks // 2


def test_a_stored_vector_that_no_row_names_is_refused() -> None:
    tensor = ir.Tensor(np.ones(8, np.float32), name="strange")
    vector = ir.Value(name="strange", type=ir.TensorType(tensor.dtype), shape=ir.Shape([8]), const_value=tensor)
    ir.Graph([], [], nodes=[], initializers=[vector])
    with pytest.raises(UsageError, match=r"'layers.0.scale' \(Mul\) reads 'strange', which no checkpoint has a tensor"):
        require_known(ir.node("Mul", [vector, vector], name="layers.0.scale"))
