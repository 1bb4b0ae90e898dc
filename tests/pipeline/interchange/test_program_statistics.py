"""Statistics of an artifact's weights, compared with numpy over the weights that are read back."""

import numpy as np
import pytest

from ingot.artifact import Artifact
from ingot.pipeline.interchange.artifact_weights import weights_of_artifact
from ingot.pipeline.interchange.layers import QuantizedLayer
from ingot.pipeline.interchange.program_statistics import ProgramWeight, program_statistics
from ingot.pipeline.targets.segments import weight_operands
from ingot.pipeline.targets.segments.weight_operands import READERS
from ingot.validation.evidence import sealed_quantization
from tests.conftest import BuildArtifact
from tests.data_paths import FIXTURES
from tests.pipeline.interchange.test_artifact_weights import floats

LLAMA = FIXTURES / "checkpoints" / "llama"


def built(build: BuildArtifact, options: str, *overrides: str) -> tuple[Artifact, dict[str, ProgramWeight]]:
    """A small model with nothing packed, so that its weights are the checkpoint's own."""
    artifact = build("fp32-cpu", LLAMA, f"passes=[{{quantize-weights: {{{options}}}}}]", "generate=null", *overrides)
    return artifact, {weight.name: weight for weight in program_statistics(artifact)}


@pytest.mark.parametrize(
    "options",
    [
        "bits: 4, block_size: 16",
        "bits: 4, block_size: channel, symmetric: true",
        "bits: 3, block_size: 32",
        "bits: 2, block_size: 16, symmetric: true",
        "bits: 8, block_size: 32",
    ],
)
def test_statistics_equal_those_of_the_weights(options: str, build_unmeasured: BuildArtifact) -> None:
    artifact, found = built(build_unmeasured, options)
    layers = {weight.name: weight for weight in weights_of_artifact(artifact) if isinstance(weight, QuantizedLayer)}
    assert {f"model.{name}.weight".replace("model.lm_head", "lm_head") for name in found} == set(layers)
    for name, weight in found.items():
        layer = layers[f"model.{name}.weight".replace("model.lm_head", "lm_head")]
        read = layer.read()
        assert np.array_equal(weight.read(), floats(layer))
        assert (weight.bits, weight.elements) == (read.bits, read.codes.size)
        assert weight.symmetric == (read.zero_points is None)
        assert weight.scale_min == read.scales.min()
        assert weight.scale_max == read.scales.max()
        assert sum(weight.code_histogram) == weight.elements
        low = -(1 << (read.bits - 1)) if weight.symmetric else 0
        ends = np.isin(read.codes, [low, low + (1 << read.bits) - 1]).mean()
        assert weight.end_share == pytest.approx(ends)
        assert len(weight.code_histogram) == min(16, 1 << read.bits)


def test_a_scale_per_row_counts_as_no_blocks(build_unmeasured: BuildArtifact) -> None:
    _, found = built(build_unmeasured, "bits: 4, block_size: channel, symmetric: true")
    assert {weight.block_size for weight in found.values()} == {0}


@pytest.mark.parametrize(("engine", "zero_points"), [("onnxruntime", 1), ("native", 4)])  # bytes of a row's
def test_bytes_count_padding_scales_and_zero_points(
    engine: str, zero_points: int, build_unmeasured: BuildArtifact
) -> None:
    _, found = built(build_unmeasured, "bits: 4, block_size: 32", f"cpu.engine={engine}")
    down = found["layers.0.mlp.down_proj"]  # [32, 48]: two blocks of 32 in a row, the second half empty
    assert down.stored_bytes == 32 * (2 * 16 + 2 * 4 + zero_points)


def test_an_artifact_without_quantization_has_no_statistics(build_unmeasured: BuildArtifact) -> None:
    assert not list(program_statistics(build_unmeasured("fp32-cpu", LLAMA, "generate=null")))


def test_float8_weights_report_the_scheme_of_their_inputs(build_unmeasured: BuildArtifact) -> None:
    artifact = build_unmeasured("fp32-cpu", LLAMA, "passes=[{fp8: {activations: dynamic}}]", "generate=null")
    found = list(program_statistics(artifact))
    assert {(weight.kind, weight.bits, weight.block_size) for weight in found} == {("float", 8, 0)}
    assert {weight.activations for weight in found} == {"fp8 dynamic per token"}
    sealed = {weight.tensor: weight for weight in sealed_quantization(artifact).weights}
    assert all(sealed[weight.tensor].format == "fp8, per channel; inputs fp8 dynamic per token" for weight in found)
    assert all(sealed[weight.tensor].end_share == weight.end_share for weight in found)


def test_weights_of_an_op_without_a_reader_are_left_out(
    build_unmeasured: BuildArtifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact, found = built(build_unmeasured, "bits: 4, block_size: 32", "cpu.engine=onnxruntime")
    key = ("com.microsoft", "MatMulNBits")
    monkeypatch.setattr(weight_operands, "READERS", {op: row for op, row in READERS.items() if op != key})
    assert [weight.name for weight in program_statistics(artifact)] == ["embed_tokens"]
    assert len(found) > 1
