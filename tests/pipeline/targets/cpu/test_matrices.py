"""Descriptions of stored weights as packed matrices, and what has no tiles."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from ingot.artifact.programs.operation_row import Matrix
from ingot.errors import PassError
from ingot.passes.weights import weight_sites
from ingot.pipeline.recipe.load import load_recipe
from ingot.pipeline.targets.cpu.matrices import StoredMatrix
from ingot.pipeline.targets.cpu.writer import write_cpu_program
from ingot.pipeline.targets.table import NATIVE
from tests.each_case import each_case
from tests.parity import CHECKPOINTS
from tests.simulators.cpu_programs import LOWERING, PACKED, Entry, imported

LLAMA = CHECKPOINTS / "llama"
NAME = "layers.0.self_attn.o_proj"


def quantized(**options: object) -> Entry:
    return ("quantize-weights", options)


def stored(*passes: Entry) -> StoredMatrix:
    model = imported(LLAMA, *PACKED, *passes)
    return StoredMatrix.of(next(site.operand for site in weight_sites(model) if site.node.name == NAME))


@each_case(
    ("passes", "facts"),
    [
        ((), {"form": "float32", "block": 0, "scale_bytes": 0}),
        ((quantized(bits=4, block_size=32),), {"form": "int4", "block": 32, "scale_bytes": 4}),
        ((quantized(bits=4, block_size=32, scale_dtype="float16"),), {"form": "int4", "scale_bytes": 2}),
        (
            (quantized(bits=8, block_size=0, scale_dtype="float16"),),
            {"form": "int8", "per_row": True, "scale_bytes": 2},
        ),
        ((quantized(bits=3, block_size=16, symmetric=True),), {"form": "int3", "block": 16, "has_zeros": False}),
        ((quantized(bits=2, block_size=64, symmetric=False),), {"form": "int2", "block": 64, "has_zeros": True}),
        ((quantized(bits=8, block_size=0),), {"form": "int8", "per_row": True, "block": 32}),
        ((("fp8", {}),), {"form": "float8", "per_row": True, "block": 0, "scale_bytes": 4}),
    ],
)
def test_the_form_is_that_of_the_weight(passes: tuple[Entry, ...], facts: dict[str, object]) -> None:
    matrix = stored(*passes).matrix
    assert (matrix.n, matrix.k) == (32, 32)
    assert facts.items() <= matrix.model_dump().items()


def test_pairs_have_one_form() -> None:
    four, eight = stored(quantized(bits=4, block_size=32)), stored(quantized(bits=8, block_size=32))
    assert four.as_pairs(eight) is None
    both = four.as_pairs(four)
    assert both is not None
    assert (both.matrix.n, both.matrix.pairs) == (64, True)
    assert both.as_pairs() is None


def _scale_of_four(dequantize: ir.Node) -> None:
    dequantize.attributes["block_size"] = ir.AttrInt64("block_size", 8)


def _codes_of_sixteen(dequantize: ir.Node) -> None:
    assert dequantize.inputs[0] is not None
    dequantize.inputs[0].dtype = ir.DataType.INT16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_scale_of_four, "has blocks of 8; the CPU's kernels read multiples of 16: set block_size to 32, 64 or 128"),
        (_codes_of_sixteen, "has codes of INT16; the CPU's kernels read float8 and 2 to 8 bits"),
    ],
)
def test_other_forms_are_refused(change: Callable[[ir.Node], None], message: str) -> None:
    operand = stored(quantized(bits=4, block_size=32)).operands[0]
    dequantize = operand.producer()
    assert dequantize is not None
    change(dequantize)
    with pytest.raises(PassError, match=message):
        StoredMatrix.of(operand)


def _with_nan(operand: ir.Value) -> str:
    """Put both codes of NaN into a float8 weight; return its name."""
    dequantize = operand.producer()
    assert dequantize is not None
    codes = dequantize.inputs[0]
    assert codes is not None
    assert codes.const_value is not None
    values = codes.const_value.numpy().copy()
    values.view(np.uint8)[[0, 3, 3], [0, 1, 5]] = (0x7F, 0xFF, 0x7F)
    codes.const_value = ir.Tensor(values, name=codes.name)
    return codes.name or ""


def test_float8_codes_of_nan_are_refused_and_counted() -> None:
    operand = stored(("fp8", {})).operands[0]
    name = _with_nan(operand)
    message = rf"'{name}' has 3 NaN among 1,024 float8 codes \(0x7f or 0xff\); .*set cpu.engine: onnxruntime"
    with pytest.raises(PassError, match=message):
        StoredMatrix.of(operand)


def test_the_writer_counts_the_bytes_of_every_weight(tmp_path: Path) -> None:
    model = imported(LLAMA, "fold-constants", "clean-up", quantized(bits=4, block_size=32), *LOWERING)
    recipe = load_recipe("int4-cpu", [f"checkpoint={LLAMA}"])
    written = write_cpu_program(model, tmp_path, recipe, NATIVE)
    gate, up = (f"model.layers.0.mlp.{name}_proj.weight.q" for name in ("gate", "up"))
    assert written.weight_bytes[gate] == written.weight_bytes[up]
    pairs = Matrix(n=96, k=32, form="int4", block=32, scale_bytes=4, pairs=True, has_zeros=True)
    assert 2 * written.weight_bytes[gate] == pairs.num_bytes
