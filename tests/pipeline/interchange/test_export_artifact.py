"""Exports of artifacts: the same weights, the same tokens, refusals that name a fitting form."""

from pathlib import Path

import numpy as np
import pytest

from ingot.artifact import Artifact
from ingot.errors import UsageError
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.checkpoint.tensors import EMBEDDING
from ingot.pipeline.interchange.artifact_weights import weights_of_artifact
from ingot.pipeline.interchange.export import export_artifact, export_checkpoint
from ingot.pipeline.recipe.load import load_recipe
from ingot.runtime import Engine, SamplingParams
from tests.conftest import BuildArtifact
from tests.data_paths import DEMO_MODEL, FIXTURES
from tests.pipeline.interchange.test_artifact_weights import floats

SCHEME = "bits: 4, block_size: 32, symmetric: true, embedding: none, lm_head: none"
LLAMA = FIXTURES / "checkpoints" / "llama"
CALIBRATION = ("calibration.text=checkpoint:heldout.txt", "calibration.sequences=4")
CHAINS = {
    "round-to-nearest": f"[fold-constants, pack-projections, {{quantize-weights: {{{SCHEME}}}}}, round-scales]",
    "gptq": f"[fold-constants, pack-projections, fuse-gated-activation, {{gptq: {{{SCHEME}}}}}, round-scales]",
    "awq, gptq": f"[pack-projections, {{awq: {{bits: 4, block_size: 32, steps: 2}}}}, {{gptq: {{{SCHEME}}}}}, "
    "round-scales]",
}


def demo(build: BuildArtifact, checkpoint: Path, chain: str) -> Artifact:
    """Two layers of the demo model, quantized by the named chain."""
    return build("fp32-cpu", checkpoint, f"passes={CHAINS[chain]}", *CALIBRATION, "generate=null")


def same_weights(folder: Path, artifact: Artifact) -> bool:
    """Whether an exported checkpoint dequantizes to the artifact's values, bit for bit."""
    checkpoint = Checkpoint.open(folder)
    weights = weights_of_artifact(artifact)
    assert set(checkpoint.shapes) == {weight.name for weight in weights}
    for weight in weights:
        encoded = checkpoint.encoded.get(weight.name)
        found = encoded.dequantize() if encoded else np.asarray(checkpoint.external(weight.name).numpy())
        if not np.array_equal(found.astype(np.float32), floats(weight)):
            return False
    return True


def greedy_tokens(artifact: Artifact) -> tuple[int, ...]:
    """32 tokens after a Python prompt."""
    with Engine.load(artifact) as engine:
        return tuple(
            engine.generate("def read_file(path):\n", SamplingParams(max_tokens=32, ignore_eos=True)).token_ids
        )


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("format_name", ["gptq", "awq", "compressed-tensors", "gguf", "safetensors"])
def test_an_exported_checkpoint_holds_the_artifacts_weights(
    chain: str, format_name: str, build_unmeasured: BuildArtifact, two_layers: Path, tmp_path: Path
) -> None:
    artifact = demo(build_unmeasured, two_layers, chain)
    folder = export_artifact(artifact, tmp_path / "out", format_name)
    assert same_weights(folder, artifact)
    assert (folder / "tokenizer.json").read_bytes() == (DEMO_MODEL / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("chain", CHAINS)
def test_a_build_of_the_exported_checkpoint_gives_the_same_greedy_tokens(
    chain: str, build_unmeasured: BuildArtifact, two_layers: Path, tmp_path: Path
) -> None:
    artifact = demo(build_unmeasured, two_layers, chain)
    folder = export_artifact(artifact, tmp_path / "out", "compressed-tensors")
    again = build_unmeasured("fp32-cpu", folder, "generate=null")
    assert greedy_tokens(again) == greedy_tokens(artifact)


@pytest.mark.parametrize(
    "chain",
    [
        f"[{{quantize-weights: {{{SCHEME}}}}}]",
        "[{fp8: {activations: dynamic}}]",
        "[{quantize-weights: {bits: 8, block_size: channel, symmetric: true, embedding: none, lm_head: none}}, "
        "{quantize-activations: {mode: dynamic}}]",
    ],
)
def test_a_recipe_and_its_artifact_are_exported_to_the_same_weights(
    chain: str, build_unmeasured: BuildArtifact, tmp_path: Path
) -> None:
    passes = f"passes={chain}"
    folder = export_checkpoint(
        load_recipe("fp32-cpu", [f"checkpoint={LLAMA}", passes]), tmp_path / "recipe", "compressed-tensors"
    )
    artifact = build_unmeasured("fp32-cpu", LLAMA, passes, "generate=null")
    export_artifact(artifact, tmp_path / "artifact", "compressed-tensors")
    assert same_weights(folder, artifact)
    assert (folder / "model.safetensors").read_bytes() == (tmp_path / "artifact" / "model.safetensors").read_bytes()
    assert (folder / "config.json").read_bytes() == (tmp_path / "artifact" / "config.json").read_bytes()


def test_a_tied_head_that_alone_is_quantized_leaves_the_embedding_unchanged(
    build_unmeasured: BuildArtifact, tmp_path: Path
) -> None:
    tied = LLAMA.with_name("llama-tied-biases")
    passes = "passes=[{quantize-weights: {bits: 8, block_size: 32, embedding: none, lm_head: 8}}]"
    recipe = load_recipe("fp32-cpu", [f"checkpoint={tied}", passes])
    written = Checkpoint.open(export_checkpoint(recipe, tmp_path / "out", "compressed-tensors"))
    source = Checkpoint.open(tied)
    assert source.config["tie_word_embeddings"]
    assert not written.config["tie_word_embeddings"]
    assert "lm_head.weight" in written.encoded
    tables = [np.asarray(checkpoint.external(EMBEDDING).numpy()) for checkpoint in (written, source)]
    np.testing.assert_array_equal(tables[0], tables[1])
    assert same_weights(tmp_path / "out", build_unmeasured("fp32-cpu", tied, passes, "generate=null"))


@pytest.mark.parametrize(
    "chain",
    [
        f"[{{rotate: {{}}}}, {{quantize-weights: {{{SCHEME}}}}}]",
        f"[{{prune-structure: {{ffn: 512}}}}, {{quantize-weights: {{{SCHEME}}}}}]",
        "[{smooth-quant: {embedding: none, lm_head: none}}]",
    ],
)
def test_scaled_rotated_or_pruned_weights_equal_those_of_the_program(
    chain: str, build_unmeasured: BuildArtifact, two_layers: Path, tmp_path: Path
) -> None:
    settings = [f"passes={chain}", CALIBRATION[0], "calibration.sequences=2"]
    recipe = load_recipe("fp32-cpu", [f"checkpoint={two_layers}", *settings])
    export_checkpoint(recipe, tmp_path / "out", "compressed-tensors")
    assert same_weights(tmp_path / "out", build_unmeasured("fp32-cpu", two_layers, *settings, "generate=null"))


def test_a_refusal_names_the_formats_that_hold_the_weights(build_unmeasured: BuildArtifact, tmp_path: Path) -> None:
    artifact = build_unmeasured("int4-cpu")
    with pytest.raises(UsageError) as refused:
        export_artifact(artifact, tmp_path / "out", "gptq")
    assert "gptq keeps model.embed_tokens.weight in floats, but it has 8 bits asymmetric" in str(refused.value)
    assert "with --widen (the same values in another form) compressed-tensors" in str(refused.value)
    assert "with --widen --round-scales awq, gptq" in str(refused.value)
    notes: list[str] = []
    folder = export_artifact(artifact, tmp_path / "out", "compressed-tensors", widen=True, note=notes.append)
    assert same_weights(folder, artifact)
    assert notes == [
        "model.embed_tokens.weight (8 bits asymmetric in blocks of 128) becomes float32: compressed-tensors keeps it "
        "in floats"
    ]


def test_a_recipe_is_refused_before_its_calibration_text_is_read(tmp_path: Path) -> None:
    recipe = load_recipe("int4-awq-gptq-cpu", [f"checkpoint={DEMO_MODEL}", f"calibration.text={tmp_path / 'none.txt'}"])
    with pytest.raises(UsageError, match=r"gguf holds .* but model\.embed_tokens .*with --widen"):
        export_checkpoint(recipe, tmp_path / "out", "gguf")


def test_scales_that_float16_rounds_are_refused_after_quantization(
    build_unmeasured: BuildArtifact, two_layers: Path, tmp_path: Path
) -> None:
    passes = f"passes=[{{quantize-weights: {{{SCHEME}}}}}]"
    artifact = build_unmeasured("fp32-cpu", two_layers, passes, "generate=null")
    with pytest.raises(
        UsageError, match=r"stores scales as float16.*As they are, these weights fit compressed-tensors"
    ):
        export_artifact(artifact, tmp_path / "out", "gptq")
    assert export_artifact(artifact, tmp_path / "out", "gptq", round_scales=True).is_dir()
