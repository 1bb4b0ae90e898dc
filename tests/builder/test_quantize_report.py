"""quantize_report combines sealed figures, the program's, and new ones from the checkpoint and a text."""

import json
import shutil
from pathlib import Path

import pytest

from ingot.artifact import Artifact, open_artifact
from ingot.artifact.programs.cpu_program_checks import read_operations
from ingot.builder.quantize_report import KLText, quantize_report
from ingot.errors import ArtifactError, UsageError
from ingot.validation.evidence import sealed_quantization
from tests.builder.test_layer_kl import EVALUATED, TEXT
from tests.conftest import BuildArtifact


@pytest.fixture(scope="module")
def artifact(build_unmeasured: BuildArtifact, two_layers: Path, memory_of_this_process: None) -> Artifact:
    """Two layers of the demo model in 4 bits, with the KL of each weight."""
    return build_unmeasured("int4-cpu", two_layers, EVALUATED, "generate=null")


def without_evidence(artifact: Artifact, folder: Path) -> Artifact:
    """Copy the artifact without its evidence, as an older Ingot sealed it."""
    shutil.copytree(artifact.path, folder)
    shutil.rmtree(folder / "evidence")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"] = {name: entry for name, entry in manifest["files"].items() if not name.startswith("evidence/")}
    del manifest["verdict"]  # it is derived from the files
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return open_artifact(folder, verify=False)


def test_figures_from_the_program_equal_the_sealed_ones(artifact: Artifact) -> None:
    sealed = {weight.tensor: weight for weight in sealed_quantization(artifact).weights}
    found, remarks = quantize_report(artifact)
    assert remarks == []
    assert len(found.weights) == len(sealed)
    for weight in found.weights:
        kept = sealed[weight.tensor]
        assert (weight.name, weight.bits, weight.format, weight.kl) == (kept.name, kept.bits, kept.format, kept.kl)
        assert (weight.scale_min, weight.scale_max, weight.end_share) == (
            kept.scale_min,
            kept.scale_max,
            kept.end_share,
        )
        assert weight.stored_bytes == kept.stored_bytes
        assert weight.code_histogram


def test_errors_from_the_checkpoint_equal_those_of_the_build(
    artifact: Artifact, two_layers: Path, tmp_path: Path
) -> None:
    bare = without_evidence(artifact, tmp_path / "bare")
    alone, _ = quantize_report(bare)
    assert all(weight.relative_error is None and weight.end_share is not None for weight in alone.weights)
    assert alone.kl_absent == "the build sealed none"
    sealed = {weight.name: weight for weight in sealed_quantization(artifact).weights}
    found, _ = quantize_report(bare, two_layers)
    for weight in found.weights:
        assert weight.relative_error == pytest.approx(sealed[weight.name].relative_error, rel=1e-5)
        assert weight.outlier_share == sealed[weight.name].outlier_share


@pytest.mark.parametrize("engine", ["native", "onnxruntime"])
def test_errors_of_float16_scales_are_those_of_the_stored_weights(
    engine: str, build_unmeasured: BuildArtifact, two_layers: Path
) -> None:
    made = build_unmeasured("int8-cpu", two_layers, f"cpu.engine={engine}", "generate=null")
    sealed = {weight.name: weight for weight in sealed_quantization(made).weights}
    found, _ = quantize_report(made, two_layers)
    assert {weight.scale_dtype for weight in found.weights} == {"float16"}
    for weight in found.weights:
        assert weight.relative_error == pytest.approx(sealed[weight.name].relative_error, rel=1e-5)
        assert (weight.scale_min, weight.scale_dtype) == (sealed[weight.name].scale_min, "float16")
    if engine == "native":
        matrices = read_operations(made).matrices.values()
        assert {(matrix.form, matrix.scale_bytes) for matrix in matrices} == {("int8", 2)}


def test_kl_from_a_text_is_near_that_of_the_build(artifact: Artifact, two_layers: Path, tmp_path: Path) -> None:
    text = tmp_path / "beginning.txt"  # the build spreads its two windows over the first 512 tokens
    text.write_text(TEXT.read_text(encoding="utf-8")[:20_000], encoding="utf-8")
    found, remarks = quantize_report(artifact, two_layers, KLText(text, tokens=256))
    assert remarks == []
    assert found.kl is not None
    assert (found.kl.text, found.kl.tokens, found.kl.window_tokens) == ("beginning.txt", 256, 128)
    sealed = {weight.name: weight.kl for weight in sealed_quantization(artifact).weights}
    first, again = found.worst_first[0], sum(weight.kl or 0 for weight in found.weights)
    assert again == pytest.approx(sum(kl or 0 for kl in sealed.values()), rel=0.5)  # another text's windows
    assert sealed[first.name] is not None


def test_weights_that_were_scaled_are_not_compared_with_the_checkpoint(
    build_unmeasured: BuildArtifact, two_layers: Path
) -> None:
    passes = "passes=[{awq: {steps: 2}}, {quantize-weights: {lm_head: none, embedding: none}}]"
    calibration = ("calibration.text=checkpoint:heldout.txt", "calibration.sequences=2")
    scaled = build_unmeasured("fp32-cpu", two_layers, passes, *calibration, "generate=null")
    found, remarks = quantize_report(scaled, two_layers, KLText(TEXT))
    assert found.weights == quantize_report(scaled)[0].weights
    assert remarks == [
        "awq changed the weights before they were rounded, so they cannot be compared with the checkpoint's; the "
        "figures are those that the build measured"
    ]


def test_a_text_without_a_checkpoint_is_refused(artifact: Artifact) -> None:
    with pytest.raises(UsageError, match=r"--text requires the checkpoint's weights; add --checkpoint FOLDER"):
        quantize_report(artifact, text=KLText(TEXT))


def test_invalid_sealed_statistics_are_refused_with_their_file(artifact: Artifact, tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(artifact.path, folder)
    (folder / "evidence" / "quantization.json").write_text(
        "[]".ljust(artifact.manifest.files["evidence/quantization.json"].bytes)
    )
    with pytest.raises(ArtifactError, match=r"quantization\.json: invalid statistics of quantized weights"):
        quantize_report(open_artifact(folder, verify=False))
