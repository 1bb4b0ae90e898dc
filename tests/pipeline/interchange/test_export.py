"""Exports of recipes and artifacts read back with the same codes and logits; a refusal names a format that fits."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from ingot.artifact import Artifact
from ingot.errors import UsageError
from ingot.passes.manager import PassManager
from ingot.passes.model_facts import DEQUANTIZED
from ingot.passes.registry import make_pass
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.checkpoint.formats.decoded import load
from ingot.pipeline.checkpoint.tensors import EMBEDDING
from ingot.pipeline.interchange.artifact_weights import weights_of_artifact
from ingot.pipeline.interchange.export import export_artifact, export_checkpoint
from ingot.pipeline.model.importer import import_checkpoint
from ingot.pipeline.recipe.load import load_recipe
from ingot.pipeline.recipe.schema import Recipe
from ingot.pipeline.targets.segments.onnx_files import write_program
from ingot.runtime import Engine, SamplingParams
from tests.conftest import BuildArtifact
from tests.data_paths import DEMO_MODEL, FIXTURES
from tests.each_case import each_case
from tests.parity import CHECKPOINTS, LOGITS, compare, load_logits
from tests.pipeline.checkpoint.formats.tiny_model import VOCABULARY, quantize, recipe, tiny_checkpoint
from tests.pipeline.interchange.test_artifact_weights import floats
from tests.pipeline.targets.program_chain import ProgramChain
from tests.pipeline.tiny_checkpoint import edit_json, edit_tensors
from tests.reference_runner import ReferenceRunner
from tests.tolerances import within

Weights = dict[str, np.ndarray[Any, Any]]
TOKENS = np.random.default_rng(0).integers(0, VOCABULARY, 24)


def halves(**options: Any) -> dict[str, Any]:
    """quantize-weights of the linear layers with float16 scales."""
    return quantize(scale_dtype="float16", **options)


CASES: dict[str, tuple[str, dict[str, Any] | None]] = {
    "gptq asymmetric": ("gptq", halves()),
    "gptq, blocks wider than rows": ("gptq", halves(block_size=128)),
    "gptq 8 bits symmetric, whole rows": ("gptq", halves(bits=8, block_size="channel", symmetric=True)),
    "awq asymmetric": ("awq", halves()),
    "awq symmetric, one layer in floats": ("awq", halves(symmetric=True, overrides={"*.1.mlp.up_proj": "none"})),
    "compressed-tensors asymmetric": ("compressed-tensors", halves()),
    "compressed-tensors 8 bits, whole rows": ("compressed-tensors", halves(bits=8, block_size="channel")),
    "compressed-tensors, two schemes": (
        "compressed-tensors",
        halves(lm_head=8, overrides={"*.down_proj": {"bits": 8, "symmetric": True}}),
    ),
    "gguf Q4_0, Q8_0": ("gguf", halves(symmetric=True, lm_head=8, embedding=8)),
    "gguf floats": ("gguf", None),
    "safetensors": ("safetensors", halves(lm_head=8, embedding=4)),
}
RTN = {"quantize-weights": {"block_size": "channel", "lm_head": "none", "embedding": "none"}}
TIED = ("llama-tied-biases", "granite-tied-biases", "smollm3")


def dequantized(checkpoint: Checkpoint) -> Weights:
    """Every weight as float32."""
    plain = {name: load(stored).astype(np.float32) for name, stored in checkpoint.tensors.items()}
    return plain | {name: tensor.dequantize() for name, tensor in checkpoint.encoded.items()}


def in_ir(model: ir.Model) -> Weights:
    """Every two-dimensional weight of the IR as float32, by the checkpoint's name."""
    found = {}
    for node in model.graph:
        if node.op_type == "DequantizeLinear" and node.inputs[0] is not None and node.inputs[0].is_initializer():
            codes, scale, *zero = (values(operand) for operand in node.inputs)
            block = node.attributes.get_int("block_size", codes.shape[1])
            columns = np.arange(codes.shape[1]) // block
            points = zero[0].reshape(len(codes), -1).astype(np.float32)[:, columns] if zero else np.float32(0)
            name = node.outputs[0].name or ""
            found[name.removesuffix(".dequantized")] = (codes.astype(np.float32) - points) * scale.reshape(
                len(codes), -1
            )[:, columns]
    names = [name for name in model.graph.initializers if name.endswith(".weight")]
    return found | {name: values(model.graph.initializers[name]) for name in names}


def values(value: ir.Value | None) -> np.ndarray[Any, Any]:
    """A copy of an initializer's values."""
    assert value is not None
    assert value.const_value is not None
    return np.array(value.const_value.numpy())


def logits(model: ir.Model, folder: Path) -> np.ndarray[Any, Any]:
    lowering = ["lower-onnxruntime-cpu", "clean-up", "partition-at-attention"]
    PassManager([make_pass(name) for name in lowering]).run(model)
    return ProgramChain(write_program(model, folder)[0], folder).logits(TOKENS)


@each_case("name", CASES)
def test_an_export_reads_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    format_name, quantization = CASES[name]
    made = recipe(tmp_path, tiny_checkpoint(tmp_path / "model"), *([quantization] if quantization else []))
    folder = export_checkpoint(made, tmp_path / "out", format_name)

    model = import_checkpoint(Checkpoint.open(tmp_path / "model"))
    PassManager(made.make_passes()).run(model)
    expected, found = in_ir(model), dequantized(Checkpoint.open(folder))
    assert set(expected) == set(found)
    assert all(np.array_equal(found[key], expected[key]) for key in expected)

    again = import_checkpoint(Checkpoint.open(folder))
    assert not DEQUANTIZED.is_in(again) or format_name == "gguf"
    if format_name != "safetensors":
        assert np.array_equal(logits(again, tmp_path / "again"), logits(model, tmp_path / "first"))


def test_quantize_weights_skips_quantized_weights(tmp_path: Path) -> None:
    made = recipe(tmp_path, tiny_checkpoint(tmp_path / "model"), quantize(scale_dtype="float16"))
    folder = export_checkpoint(made, tmp_path / "out", "gptq")
    before = in_ir(import_checkpoint(Checkpoint.open(folder)))
    model = import_checkpoint(Checkpoint.open(folder))
    PassManager([make_pass("pack-projections"), make_pass("quantize-weights", {"bits": 8})]).run(model)
    after = in_ir(model)
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert changed == {"lm_head.weight", "model.embed_tokens.weight"}


def test_an_export_of_an_export_holds_the_same_weights(tmp_path: Path) -> None:
    made = recipe(tmp_path, tiny_checkpoint(tmp_path / "model"), quantize(symmetric=True, scale_dtype="float16"))
    folder = export_checkpoint(made, tmp_path / "gptq", "gptq")
    expected = dequantized(Checkpoint.open(folder))
    for format_name in ("awq", "compressed-tensors", "gguf", "safetensors"):
        folder = export_checkpoint(recipe(tmp_path, folder), tmp_path / format_name, format_name)
        found = dequantized(Checkpoint.open(folder))
        assert all(np.array_equal(found[name], expected[name]) for name in expected)


def test_a_refused_export_leaves_nothing_and_no_folder_is_replaced(tmp_path: Path) -> None:
    made = recipe(tmp_path, tiny_checkpoint(tmp_path / "model"), quantize())
    with pytest.raises(Exception, match="stores scales as float16"):
        export_checkpoint(made, tmp_path / "out", "gptq")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    with pytest.raises(Exception, match="exists already"):
        export_checkpoint(made, tmp_path / "there", "compressed-tensors")
    assert {path.name for path in tmp_path.iterdir()} == {"model", "there", "recipe.yaml"}


def reference_logits(name: str, model: ir.Model) -> list[np.ndarray[Any, np.dtype[np.float32]]]:
    tokens, _ = load_logits(CHECKPOINTS / name / LOGITS)
    return ReferenceRunner(model).run_ragged(tokens)


def rotated(made: Recipe) -> ir.Model:
    model = import_checkpoint(Checkpoint.open(made.require_checkpoint()))
    PassManager(made.make_passes()).run(model)
    return model


@each_case("name", [*TIED, "qwen2", "phi3", "gemma2"])
def test_a_rotated_checkpoint_gives_the_same_logits(name: str, tmp_path: Path) -> None:
    folder = export_checkpoint(recipe(tmp_path, CHECKPOINTS / name, "rotate"), tmp_path / "out", "safetensors")
    first, again = (import_checkpoint(Checkpoint.open(place)) for place in (CHECKPOINTS / name, folder))
    assert within("parity.float32", compare(reference_logits(name, again), reference_logits(name, first)).worst, name)


@pytest.mark.parametrize("name", TIED)
def test_a_rotated_tied_head_is_written_separately_and_untied_in_the_config(name: str, tmp_path: Path) -> None:
    made = recipe(tmp_path, CHECKPOINTS / name, "rotate", RTN)
    folder = export_checkpoint(made, tmp_path / "out", "compressed-tensors")
    written = Checkpoint.open(folder)
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is False
    assert written.shapes["lm_head.weight"] == written.shapes["model.embed_tokens.weight"]
    assert np.all(np.asarray(written.external("model.norm.weight").numpy()) == 1)
    expected, found = reference_logits(name, rotated(made)), reference_logits(name, import_checkpoint(written))
    assert within("parity.float32", compare(found, expected).worst, name)


SCHEME = "bits: 4, block_size: 32, symmetric: true, embedding: none, lm_head: none"
FLOAT16_SCALES = f"{SCHEME}, scale_dtype: float16"
LLAMA = FIXTURES / "checkpoints" / "llama"
CALIBRATION = ("calibration.text=checkpoint:heldout.txt", "calibration.sequences=4")
CHAINS = {
    "round-to-nearest": f"[fold-constants, pack-projections, {{quantize-weights: {{{FLOAT16_SCALES}}}}}]",
    "gptq": f"[fold-constants, pack-projections, fuse-gated-activation, {{gptq: {{{FLOAT16_SCALES}}}}}]",
    "awq, gptq": f"[pack-projections, {{awq: {{bits: 4, block_size: 32, steps: 2, scale_dtype: float16}}}}, "
    f"{{gptq: {{{FLOAT16_SCALES}}}}}]",
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


@each_case("chain", CHAINS)
@each_case("format_name", ["gptq", "awq", "compressed-tensors", "gguf", "safetensors"])
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
    assert "with --widen (the same values in another form) awq, compressed-tensors, gptq" in str(refused.value)
    wide = build_unmeasured("int4-cpu", DEMO_MODEL, "passes.quantize-weights.scale_dtype=float32")
    with pytest.raises(UsageError) as refused:
        export_artifact(wide, tmp_path / "out", "gptq")
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


def test_scales_that_float16_cannot_hold_are_refused_however_they_are_rounded(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "model")
    name = "model.layers.1.mlp.up_proj.weight"
    edit_tensors(source, {name: np.asarray(Checkpoint.open(source).external(name).numpy()) * np.float32(1e-8)})
    made = recipe(tmp_path, source, quantize(symmetric=True))
    with pytest.raises(
        UsageError, match=r"holds 6e-8 to 65504, and those of model\.layers\.1\.mlp\.up_proj .* go beyond"
    ):
        export_checkpoint(made, tmp_path / "out", "gptq", round_scales=True)
    assert not (tmp_path / "out").exists()


def test_an_export_that_rounds_scales_chooses_codes_for_them(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "model")
    folders = [
        export_checkpoint(recipe(tmp_path, source, made), tmp_path / name, "gptq", round_scales=name == "rounded")
        for name, made in (("chosen", halves(bits=8)), ("rounded", quantize(bits=8)))
    ]
    chosen, rounded = ((folder / "model.safetensors").read_bytes() for folder in folders)
    assert chosen == rounded


def test_the_config_of_dequantized_weights_says_float32(tmp_path: Path) -> None:
    """Loaders round weights to the type that config.json names."""
    source = tiny_checkpoint(tmp_path / "model")
    edit_json(source / "config.json", {"dtype": "bfloat16", "torch_dtype": "bfloat16"})
    folder = export_checkpoint(recipe(tmp_path, source, quantize()), tmp_path / "out", "safetensors")
    config = json.loads((folder / "config.json").read_text())
    assert (config["dtype"], config["torch_dtype"]) == ("float32", "float32")
    coded = export_checkpoint(recipe(tmp_path, source, quantize()), tmp_path / "coded", "compressed-tensors")
    assert json.loads((coded / "config.json").read_text())["dtype"] == "bfloat16"


def test_norms_without_weights_are_not_exported(tmp_path: Path) -> None:
    made = load_recipe("int4-cpu", [f"checkpoint={CHECKPOINTS / 'olmo'}"])
    with pytest.raises(UsageError, match="a olmo model has norms without weights, into which passes fold scales"):
        export_checkpoint(made, tmp_path / "out", "compressed-tensors")
