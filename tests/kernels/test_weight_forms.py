"""Every form of weights and activations that passes produce, through the launch program, against plain onnxruntime."""

import numpy as np
import onnx_ir as ir
import pytest

from ingot.artifact.launch_program import Launch
from ingot.errors import PassError
from ingot.passes.calibration import calibrate_with
from ingot.pipeline.calibrate import CalibrationEngine
from ingot.pipeline.targets.cuda import lower_linear as lower_matmul
from ingot.pipeline.targets.cuda.lowering import Lowered, lower_to_launches
from ingot.pipeline.targets.cuda.program_builder import Bucket
from tests.kernels.programs import (
    CHECKPOINTS,
    CONTEXT,
    Entry,
    exact_logits,
    fused,
    imported,
    logits_by_program,
    prompts,
)
from tests.passes.calibration_data import calibration_data

CHANNEL: dict[str, object] = {"bits": 8, "block_size": "channel", "symmetric": True, "lm_head": "none"}
FLOATS = {"lm_head": "none", "embedding": "none"}
# Without rounded activations the error is that of float32 sums. With them, a value at the border of two codes may take
# the other code, which differs by a 127th of its row's largest value.
EXACT, ROUNDED = 2e-5, 5e-3
FORMS: dict[str, tuple[float, list[Entry]]] = {
    "4 bits, head and table 8": (EXACT, [("quantize-weights", {"block_size": 32, "lm_head": 8, "embedding": 8})]),
    "4 bits by channel, symmetric": (EXACT, [("quantize-weights", {**CHANNEL, "bits": 4, "embedding": 4})]),
    "3 bits, table 4": (EXACT, [("quantize-weights", {"bits": 3, "block_size": 32, "embedding": 4})]),
    "2 bits": (EXACT, [("quantize-weights", {"bits": 2, "block_size": 32, **FLOATS})]),
    "8 bits in blocks": (EXACT, [("quantize-weights", {"bits": 8, "block_size": 32, **FLOATS})]),
    "fp8 by channel": (EXACT, [("fp8", {"lm_head": True})]),
    "fp8 both": (ROUNDED, [("fp8", {"activations": "dynamic"})]),
    "fp8 both, static": (ROUNDED, [("fp8", {"activations": "static", "weights": "tensor"})]),
    "int8 both": (ROUNDED, [("quantize-activations", {}), ("quantize-weights", {**CHANNEL, "embedding": "none"})]),
    "int8 both, static": (
        ROUNDED,
        [("quantize-activations", {"mode": "static"}), ("quantize-weights", {**CHANNEL, "embedding": "none"})],
    ),
    "int8 both, with zero points": (
        ROUNDED,
        [("quantize-activations", {}), ("quantize-weights", {**CHANNEL, "symmetric": False, "embedding": "none"})],
    ),
    "int8 inputs of 4 bits": (
        ROUNDED,
        [("quantize-activations", {}), ("quantize-weights", {"block_size": 32, **FLOATS})],
    ),
    "int8 both, outliers aside": (
        ROUNDED,
        [("quantize-activations", {"outliers": 2}), ("quantize-weights", {**CHANNEL, "embedding": "none"})],
    ),
    "smoothed": (ROUNDED, [("smooth-quant", {})]),
    "scaled by awq": (
        EXACT,
        [
            ("awq", {"block_size": 32, "fold": "always", "least_gain": 0.0, "steps": 2}),
            ("quantize-weights", {"block_size": 32, **FLOATS}),
        ],
    ),
    "rotated": (EXACT, [("rotate", {}), ("quantize-weights", {"block_size": 32, **FLOATS})]),
}


def quantized(name: str, passes: list[Entry]) -> ir.Model:
    with calibrate_with(CalibrationEngine(calibration_data(4, 16, 60))):
        return imported(CHECKPOINTS / name, *passes)


@pytest.mark.parametrize("form", FORMS)
def test_logits_equal_onnxruntimes(form: str) -> None:
    limit, passes = FORMS[form]
    ids = prompts(4)
    model = quantized("llama-tied-biases" if "table" in form else "llama", passes)
    wanted = exact_logits(model, ids[0])[-2:]
    found = logits_by_program(fused(model), ids)[0]
    assert np.abs(found - wanted).max() <= limit * np.abs(wanted).max()


def lowered(form: str) -> Lowered:
    model = fused(quantized("llama", FORMS[form][1]))
    return lower_to_launches(model, (Bucket.decode(4, CONTEXT),), "fp16")


def test_layers_that_read_one_input_share_its_codes() -> None:
    launches = lowered("int8 both").programs[0].launches
    found = [step.kernel.split("-")[0] for step in launches if isinstance(step, Launch) and "layers.1." in step.node]
    assert found.count("quantize_rows") == 4  # before qkv, o, gate and up, down
    assert found.count("matmul") == 4


def test_scales_of_blocks_have_16_bits_where_activations_do() -> None:
    types = {name: weight.type for name, weight in lowered("8 bits in blocks").shared.weights.items()}
    assert {kind for name, kind in types.items() if name.endswith(".scale.groups")} == {"fp16"}


def test_block_sizes_without_a_kernel_are_refused_by_name() -> None:
    model = fused(imported(CHECKPOINTS / "llama", ("quantize-weights", {"block_size": 16, **FLOATS})))
    with pytest.raises(PassError, match=r"'model.layers.0.*' has blocks of 16; the CUDA kernels take multiples of 32"):
        lower_to_launches(model, (Bucket.decode(4, CONTEXT),))


@pytest.mark.parametrize("name", ["llama", "qwen2"])  # without a bias, and with one
def test_matmuls_of_many_rows_dequantize_the_weight_in_slices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lower_matmul, "DEQUANTIZED_FROM", 8)
    monkeypatch.setattr(lower_matmul, "_SLICE_STEP", 16)
    monkeypatch.setattr(lower_matmul, "_SLICE_BYTES", 16 * 4 * 32)
    model = imported(CHECKPOINTS / name, ("quantize-weights", {"block_size": 32, **FLOATS}))
    ids = prompts(5)
    wanted = exact_logits(model, ids[0])
    fused(model)
    (program,) = lower_to_launches(model, (Bucket.ragged(16, CONTEXT, 4),), "fp32").programs
    kernels = [step.kernel.partition("-")[0] for step in program.launches if isinstance(step, Launch)]
    assert "matmul_nbits" not in kernels
    assert kernels.count("dequantize_nbits") > 4 * 3  # projections of the layers: some in slices
    found = logits_by_program(model, ids)[0]
    assert np.abs(found - wanted[-len(found) :]).max() <= EXACT * np.abs(wanted).max()
