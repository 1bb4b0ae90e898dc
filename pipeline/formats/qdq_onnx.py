"""QDQ ONNX: the model as one standard ONNX file that plain onnxruntime runs, with codes behind DequantizeLinear.

    model.onnx               the graph: input_ids [batch, sequence] -> logits [batch, sequence, vocab]
    weights.safetensors      its external data: codes, scales, zero points, floats

Codes are INT4, UINT4, INT8, UINT8 or float8_e4m3 with one scale per row or per block of columns (`block_size`); weights
of 2 and 3 bits stand in 4. Quantized activations are QuantizeLinear and DequantizeLinear as the pass left them.
"""

from pathlib import Path

import onnx_ir as ir

from ingot.passes.manager import PassManager
from ingot.passes.registry import make_pass
from ingot.pipeline.formats.causal_graph import make_standalone
from ingot.pipeline.program_writer import write_model
from ingot.progress import Progress, silent

MODEL = "model.onnx"


def write_qdq_onnx(model: ir.Model, folder: Path, progress: Progress = silent) -> Path:
    """Write the IR of a model that no pass but quantization has changed; the model is used up. Returns the ONNX file.

    One weight is in memory at a time. PassError for a graph that was lowered, BuildError when the disk is full.
    """
    make_standalone(model)
    PassManager([make_pass("clean-up")]).run(model)
    return write_model(model, folder / MODEL, progress)
