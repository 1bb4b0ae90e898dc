"""Exports of the families of dense_cases.py: the checkpoint's own values, or a refusal that says why not."""

from pathlib import Path

import numpy as np
import pytest

from ingot.errors import UsageError
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.checkpoint.families import FAMILIES
from ingot.pipeline.interchange.artifact_weights import weights_of_artifact
from ingot.pipeline.interchange.export import export_artifact, export_checkpoint
from ingot.pipeline.interchange.layers import PlainWeight
from ingot.pipeline.recipe.load import load_recipe
from ingot.pipeline.recipe.schema import Recipe
from tests.conftest import BuildArtifact
from tests.each_case import each_case
from tests.oracle.dense_cases import DENSE_CASES
from tests.parity import CHECKPOINTS

OTHER_NAMES = {
    **dict.fromkeys(("gpt2", "gpt_bigcode", "gptj", "codegen"), "transformer.wte"),
    "biogpt": "biogpt.embed_tokens",
    "falcon": "transformer.word_embeddings",
    "gpt_neo": "transformer.wte",
    "gpt_neox": "gpt_neox.embed_in",
    "openai-gpt": "transformer.tokens_embed",
    "opt": "model.decoder.embed_tokens",
}
OTHER_LAYOUTS = {
    **dict.fromkeys(("olmo", "nanochat"), "norms without weights"),
    "persimmon": "queries, keys and values stored head by head in one matrix",
}
REORDERED = [
    name
    for name, family in FAMILIES.items()
    if family.interleaved_rope and not family.experts and name not in OTHER_NAMES
    if (CHECKPOINTS / name).is_dir()  # towers have no fixtures
]


def recipe_of(name: str) -> Recipe:
    return load_recipe("fp32-cpu", [f"checkpoint={CHECKPOINTS / name}", "evaluation=null", "latency=null", "gates={}"])


@each_case("name", [case.name for case in DENSE_CASES if case.model_type not in (*OTHER_NAMES, *OTHER_LAYOUTS)])
def test_an_export_of_the_recipe_holds_the_checkpoints_values(name: str, tmp_path: Path) -> None:
    before = Checkpoint.open(CHECKPOINTS / name)
    after = Checkpoint.open(export_checkpoint(recipe_of(name), tmp_path / name, "safetensors"))
    assert after.tensors.keys() == before.tensors.keys()
    for tensor in before.tensors:
        assert np.array_equal(np.asarray(before.external(tensor).numpy()), np.asarray(after.external(tensor).numpy()))


@pytest.mark.parametrize("name", ["arcee", "phi", "starcoder2"])
def test_weights_of_an_artifact_are_the_checkpoints(name: str, build_unmeasured: BuildArtifact) -> None:
    checkpoint = Checkpoint.open(CHECKPOINTS / name)
    artifact = build_unmeasured("fp32-cpu", checkpoint.path, "cpu.engine=onnxruntime")
    for weight in weights_of_artifact(artifact):
        assert isinstance(weight, PlainWeight)
        values = np.asarray(weight.tensor.numpy()).astype(np.float32)
        assert np.array_equal(values, np.asarray(checkpoint.external(weight.name).numpy()).astype(np.float32))


@pytest.mark.parametrize("name", REORDERED)
def test_an_artifact_with_reordered_rows_is_not_exported(
    name: str, build_unmeasured: BuildArtifact, tmp_path: Path
) -> None:
    artifact = build_unmeasured("fp32-cpu", CHECKPOINTS / name, "cpu.engine=onnxruntime")
    with pytest.raises(UsageError, match=r"another order \(deinterleave-rotary\); export from the recipe"):
        export_artifact(artifact, tmp_path / "out", "safetensors")


@pytest.mark.parametrize("name", ["minicpm3", "deepseek_v3"])
def test_latent_attention_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=rf"a {name} model has latent attention, .* Export to onnx"):
        export_checkpoint(recipe_of(name), tmp_path / "out", "safetensors")


def test_a_mixture_of_experts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"a mixtral model is a mixture of experts; .* Export to onnx"):
        export_checkpoint(recipe_of("mixtral"), tmp_path / "out", "safetensors")


@pytest.mark.parametrize("name", OTHER_LAYOUTS)
def test_a_family_with_another_layout_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"a {name} model has {OTHER_LAYOUTS[name]}"):
        export_checkpoint(recipe_of(name), tmp_path / "out", "safetensors")


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_a_family_with_other_names_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"'{OTHER_NAMES[name]}.weight' instead of .* Export to onnx"):
        export_checkpoint(recipe_of(name), tmp_path / "out", "safetensors")
