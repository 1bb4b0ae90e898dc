"""Linear layers in launch programs: every form of weights and activations, and matmuls in a library."""

import numpy as np
import onnx_ir as ir
import pytest

from ingot.artifact.programs.launch_program import Launch, LibraryMatmul
from ingot.passes.calibration import calibrate_with
from ingot.pipeline.calibrate import CalibrationEngine
from ingot.pipeline.targets.cuda.kernel_signatures import SIGNATURES
from ingot.pipeline.targets.cuda.lower import linear
from ingot.pipeline.targets.cuda.lowering import LoweredLaunches, lower_to_launches
from ingot.pipeline.targets.cuda.program_builder import Bucket
from ingot.pipeline.targets.cuda.tiles import TileTable
from tests.each_case import each_case
from tests.passes.calibration_data import calibration_data
from tests.runtime.cuda.artifacts import LibraryTiles
from tests.simulators.launch_programs import (
    CHECKPOINTS,
    CONTEXT,
    FLOATS,
    INT4,
    AlwaysWide,
    Entry,
    exact_logits,
    fused,
    imported,
    logits_by_program,
    prompts,
)

CHANNEL: dict[str, object] = {"bits": 8, "block_size": "channel", "symmetric": True, "lm_head": "none"}
# Without rounded activations the error is that of float32 sums. With them, a value at the border of two codes may take
# the other code, which differs by a 127th of its row's largest value.
EXACT, ROUNDED = 2e-5, 5e-3
HALF = 1e-2  # activations of 16 bits
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


@each_case("form", FORMS)
def test_logits_equal_onnxruntimes(form: str) -> None:
    limit, passes = FORMS[form]
    ids = prompts(4)
    model = quantized("llama-tied-biases" if "table" in form else "llama", passes)
    wanted = exact_logits(model, ids[0])[-2:]
    found = logits_by_program(fused(model), ids)[0]
    assert np.abs(found - wanted).max() <= limit * np.abs(wanted).max()


@each_case("rows", [3, 11])
def test_wide_tiles_of_sm_90_give_onnxruntimes_logits(rows: int) -> None:
    model = quantized("llama", [("quantize-weights", {"block_size": "channel", "lm_head": 4, "embedding": "none"})])
    ids = prompts(rows + 1)
    wanted = exact_logits(model, ids[0])[-2:]
    found = logits_by_program(fused(model), ids, tiles=AlwaysWide(sm=90), activations="fp16")[0]
    assert np.abs(found - wanted).max() <= HALF * np.abs(wanted).max()


def lowered(form: str) -> LoweredLaunches:
    model = fused(quantized("llama", FORMS[form][1]))
    return lower_to_launches(model, (Bucket.decode(4, CONTEXT),), "fp16")


def test_layers_that_read_one_input_share_its_codes() -> None:
    launches = lowered("int8 both").programs[0].launches
    found = [step.kernel.split("-")[0] for step in launches if isinstance(step, Launch) and "layers.1." in step.node]
    assert found.count("quantize_rows") == 2  # before o and down; norms round what qkv, gate and up read
    assert found.count("matmul") == 4


@pytest.mark.parametrize("name", ["llama", "qwen2"])  # without a bias, and with one
def test_matmuls_of_many_rows_dequantize_the_weight_in_slices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "DEQUANTIZED_FROM", 8)
    monkeypatch.setattr(linear, "DIRECT_UP_TO", 7)
    monkeypatch.setattr(linear, "_SLICE_STEP", 16)
    monkeypatch.setattr(linear, "_SLICE_BYTES", 16 * 4 * 32)
    monkeypatch.setattr(linear, "_FILLING", 0)
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


def kernels_for(rows: int, sm: int | None) -> set[str]:
    """Names of the kernels of a prompt's program."""
    model = fused(imported(CHECKPOINTS / "llama", INT4))
    lowered = lower_to_launches(model, (Bucket.ragged(rows, CONTEXT, 4),), "fp16", TileTable(sm=sm))
    return {kernel.name for kernel in lowered.shared.kernels.values()}


@pytest.mark.parametrize(("sm", "most"), [(None, 1024), (80, 1024), (90, 256)])
def test_a_weight_of_4_bits_is_multiplied_as_stored_up_to_a_number_of_rows_of_the_sm(sm: int | None, most: int) -> None:
    assert "dequantize_nbits" not in kernels_for(most, sm)
    assert "dequantize_nbits" in kernels_for(most + 16, sm)


def test_a_slice_of_a_weight_has_enough_rows_to_fill_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_SLICE_BYTES", 1)
    monkeypatch.setattr(linear, "_SLICE_STEP", 16)
    monkeypatch.setattr(linear, "_SLICE_TILE", 16)
    monkeypatch.setattr(linear, "DIRECT_UP_TO", 15)
    model = fused(imported(CHECKPOINTS / "llama", INT4))
    for rows, filling, least in ((32, 8, 64), (32, 0, 16), (64, 8, 32)):
        monkeypatch.setattr(linear, "_FILLING", filling)
        (program,) = lower_to_launches(model, (Bucket.ragged(rows, CONTEXT, 4),), "fp16", TileTable(sm=80)).programs
        counts = {_count(step) for step in program.launches if isinstance(step, Launch) and "dequantize" in step.kernel}
        assert max(counts) == least, (rows, filling)


def _count(launch: Launch) -> int:
    argument = launch.arguments[SIGNATURES["dequantize_nbits"].index("count")]
    assert argument.kind == "number"
    return int(argument.value)


def library_lowered(name: str, *quantization: Entry, rows: int = 8, activations: str = "fp16") -> LoweredLaunches:
    model = fused(imported(CHECKPOINTS / name, *quantization))
    bucket = Bucket.ragged(rows, CONTEXT, 2)
    return lower_to_launches(model, (bucket,), "fp32" if activations == "fp32" else "fp16", LibraryTiles())


def matmuls(found: LoweredLaunches) -> tuple[LibraryMatmul, ...]:
    return found.programs[0].library_matmuls


@pytest.mark.parametrize("name", ["qwen2", "granite-tied-biases", "gemma2"])
def test_matmuls_in_a_library_give_onnxruntimes_logits(name: str) -> None:
    """Biases, a scaled matmul with its bias scaled, a capped head."""
    ids = prompts(7, 3)
    model = imported(CHECKPOINTS / name)
    wanted = [exact_logits(model, sequence)[-2:] for sequence in ids]
    for found, exact in zip(logits_by_program(fused(model), ids, tiles=LibraryTiles()), wanted, strict=True):
        assert np.abs(found - exact).max() <= EXACT * np.abs(exact).max()


def test_slices_of_a_dequantized_weight_are_separate_matmuls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "DEQUANTIZED_FROM", 8)
    monkeypatch.setattr(linear, "DIRECT_UP_TO", 7)
    monkeypatch.setattr(linear, "_SLICE_BYTES", 1)
    monkeypatch.setattr(linear, "_SLICE_STEP", 64)
    monkeypatch.setattr(linear, "_FILLING", 0)
    model = imported(CHECKPOINTS / "llama", INT4)
    ids = prompts(7, 3)
    wanted = [exact_logits(model, sequence)[-2:] for sequence in ids]
    for found, exact in zip(logits_by_program(fused(model), ids, tiles=LibraryTiles()), wanted, strict=True):
        assert np.abs(found - exact).max() <= EXACT * np.abs(exact).max()
    slices = [one for one in matmuls(library_lowered("llama", INT4)) if one.weight.kind == "buffer" and one.out.offset]
    assert {(one.n, one.out.offset, one.out_stride) for one in slices} == {(32, 64, 96)}


def test_every_plain_matmul_runs_in_the_library_and_none_is_split() -> None:
    found = library_lowered("llama")
    assert not [kernel for kernel in found.shared.kernels.values() if kernel.name == "matmul"]
    head = matmuls(found)[-1]
    assert (head.x.type, head.weight.type, head.out.type, head.out.name) == ("fp16", "fp16", "fp32", "logits")
    assert (head.rows, head.columns, head.x_stride, head.out_stride) == (2, 32, 32, head.n)
    assert all(f"{name}.parts" not in found.programs[0].places for one in matmuls(found) for name in one.buffers)


def test_matmuls_with_a_cap_or_a_bias_of_another_type_use_ingots_kernel() -> None:
    assert "lm_head" not in " ".join(one.node for one in matmuls(library_lowered("gemma2")))
    assert "matmul" in {kernel.name for kernel in library_lowered("gemma2").shared.kernels.values()}
