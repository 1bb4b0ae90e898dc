"""The tiny llama and its program."""

import onnx_ir as ir
import pytest

from ingot.artifact.programs.launch_program import CudaProgram
from ingot.pipeline.targets.cuda.lowering import lower_to_launches
from ingot.pipeline.targets.cuda.tiles import TileTable
from tests.builder.tune.programs import BUCKETS, QUANTIZED, imported, program_of


@pytest.fixture(scope="module")
def model() -> ir.Model:
    """The tiny llama: 4-bit layers, a plain head."""
    return imported(QUANTIZED)


@pytest.fixture(scope="module")
def program(model: ir.Model) -> CudaProgram:
    return program_of(model, lower_to_launches(model, BUCKETS, "fp16", TileTable(sm=90)))
