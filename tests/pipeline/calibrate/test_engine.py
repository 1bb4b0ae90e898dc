"""The calibration engine: its statistics, logits, memory use and data."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from safetensors.numpy import load_file

from ingot.artifact import CALIBRATION_FILE
from ingot.artifact.programs.expert_choices import EXPERTS_FILE, read_expert_choices
from ingot.errors import UsageError
from ingot.passes.model_facts import EXPERT_CHOICES, MODEL
from ingot.pipeline.calibrate import CalibrationData, CalibrationEngine
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.compile import compile_recipe
from ingot.pipeline.model.importer import import_checkpoint
from ingot.pipeline.recipe.load import load_recipe
from tests.conftest import BuildArtifact
from tests.data_paths import DEMO_MODEL
from tests.each_case import each_case
from tests.parity import CHECKPOINTS
from tests.passes.calibration_data import calibration, calibration_data
from tests.passes.tiny_decoder import TinyDecoder, array
from tests.reference_runner import FloatArray, ReferenceRunner
from tests.tolerances import within

TEXT = DEMO_MODEL / "heldout.txt"


def test_statistics_are_those_of_the_layer_s_inputs() -> None:
    model = TinyDecoder().model
    stages = calibration().stages(model)
    stage = next(stages)
    (group,) = stage.groups
    rows = array(model, "model.embed_tokens.weight").astype(np.float64)[calibration_data().sequences.reshape(-1)]
    normed = rows / np.sqrt(np.square(rows).mean(axis=1, keepdims=True) + 1e-5)
    inputs = normed * array(model, "layers.0.input_layernorm.weight")
    assert [node.name for node in group.linears] == [f"layers.0.{name}_proj" for name in "qkv"]
    np.testing.assert_allclose(stage.gram(group.source), inputs.T @ inputs, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(stage.mean_absolute(group.source), np.abs(inputs).mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(stage.max_absolute(group.source), np.abs(inputs).max(axis=0), rtol=1e-4)
    np.testing.assert_allclose(stage.rows(group.source, 3), inputs[[0, 639, 1279]], rtol=1e-4, atol=1e-5)


def test_logits_equal_those_of_the_paged_reference() -> None:
    data = calibration_data(sequences=3)
    logits = np.concatenate(list(CalibrationEngine(data).logits(TinyDecoder().model)))
    reference = ReferenceRunner(TinyDecoder().model).run_ragged(data.sequences.tolist(), [(16, 16, 16)])
    assert within("parity.float32", float(np.abs(logits - np.concatenate(reference)).max()))


@each_case("family", ["llama", "gemma2", "gemma3_text", "olmo2", "phi3", "qwen2", "granite"])
def test_logits_of_every_kind_of_family_equal_those_of_the_paged_reference(family: str) -> None:
    def imported() -> ir.Model:
        return import_checkpoint(Checkpoint.open(CHECKPOINTS / family))

    vocab = MODEL.of(imported()).vocab_size
    data = calibration_data(sequences=2, tokens=24, vocab=vocab)
    logits = np.concatenate(list(CalibrationEngine(data).logits(imported())))
    reference = np.concatenate(ReferenceRunner(imported()).run_ragged(data.sequences.tolist(), [(12, 12)]))
    assert within("parity.float32", float(np.abs(logits - reference).max()), scale=max(1.0, np.abs(reference).max()))


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3"])
def test_sequences_of_different_lengths_have_the_same_logits_together_as_alone(family: str) -> None:
    def imported() -> ir.Model:
        return import_checkpoint(Checkpoint.open(CHECKPOINTS / family))

    vocab = MODEL.of(imported()).vocab_size
    whole = calibration_data(sequences=5, tokens=24, vocab=vocab)
    lengths = np.array([3, 7, 8, 20, 24])
    logits = np.concatenate(list(CalibrationEngine(replace(whole, lengths=lengths)).logits(imported())))
    alone = [
        np.concatenate(list(CalibrationEngine(CalibrationData(whole.facts, row[None, :length])).logits(imported())))
        for row, length in zip(whole.sequences, lengths, strict=True)
    ]
    reference = np.concatenate(alone)
    assert logits.shape == reference.shape
    assert within("parity.float32", float(np.abs(logits - reference).max()), scale=max(1.0, np.abs(reference).max()))


def test_padding_after_a_sequence_affects_no_statistic() -> None:
    whole, lengths = calibration_data(sequences=4), np.array([5, 9, 17, 30])
    other = whole.sequences.copy()
    other[np.arange(32) >= lengths[:, None]] = 7
    seen = []
    for sequences in (whole.sequences, other):
        service = CalibrationEngine(replace(whole, sequences=sequences, lengths=lengths))
        for stage in service.stages(TinyDecoder().model):
            source = stage.groups[0].source
            seen.append((stage.gram(source), stage.mean_absolute(source), stage.rows(source, 99)))
    half = len(seen) // 2
    for one, same in zip(seen[:half], seen[half:], strict=True):
        for first, second in zip(one, same, strict=True):
            np.testing.assert_array_equal(first, second)
    rows = seen[0][2].astype(np.float64)
    assert len(rows) == 61
    np.testing.assert_allclose(seen[0][0], rows.T @ rows, rtol=1e-4, atol=1e-4)


def test_a_stage_s_inputs_come_from_the_weights_that_the_pass_changed() -> None:
    model = TinyDecoder().model
    grams = []
    for stage in calibration().stages(model):
        grams.append(stage.gram(stage.groups[0].source))
        for node in stage.groups[0].linears:
            assert node.inputs[1] is not None
            weight = node.inputs[1].producer().inputs[0]  # type: ignore[union-attr]
            assert weight is not None
            tensor = weight.const_value
            assert tensor is not None
            np.asarray(tensor.numpy())[...] = 0
    assert grams[0].any()
    assert not grams[1].any()


def test_activations_on_disk_give_the_same_statistics() -> None:
    model = TinyDecoder().model
    kept = [stage.gram(stage.groups[0].source) for stage in calibration().stages(model)]
    spilled = [stage.gram(stage.groups[0].source) for stage in calibration(memory_bytes=0).stages(model)]
    for one, other in zip(kept, spilled, strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_recipe_s_data_reaches_the_pass_and_is_recorded(tmp_path: Path) -> None:
    overrides = [f"checkpoint={DEMO_MODEL}", f"calibration.text={TEXT}"]
    overrides += ["calibration.sequences=4", "calibration.sequence_tokens=64", "passes.gptq.refine=0"]
    recipe = load_recipe("int4-gptq-cpu", overrides)
    assert "text: heldout.txt" in recipe.resolved_yaml()
    compiled = compile_recipe(recipe, tmp_path)
    assert compiled.calibration is not None
    assert compiled.calibration.sequences == 4
    assert recipe.baseline().calibration is None


# Experts


def hidden_states(model: ir.Model, data: CalibrationData, router: str) -> FloatArray:
    """Inputs [tokens, hidden] of a router."""
    for stage in CalibrationEngine(data).stages(model):
        for group in stage.groups:
            if router in [node.name for node in group.linears]:
                return stage.rows(group.source, data.tokens)
    raise AssertionError(router)


def chosen_by_logits(logits: FloatArray, bias: FloatArray) -> list[set[int]]:
    """The three largest logits."""
    return [set(np.argsort(row)[-3:].tolist()) for row in logits]


def chosen_in_groups(logits: FloatArray, bias: FloatArray) -> list[set[int]]:
    """The three largest scores in the two pairs of experts with the largest sums."""
    found = []
    for scores in 1 / (1 + np.exp(-logits)) + bias:
        pairs = sorted(range(4), key=lambda pair: -scores[2 * pair : 2 * pair + 2].sum())[:2]
        allowed = [expert for pair in pairs for expert in (2 * pair, 2 * pair + 1)]
        found.append(set(sorted(allowed, key=lambda expert: -scores[expert])[:3]))
    return found


@each_case(("family", "layer", "choose"), [("qwen3_moe", 0, chosen_by_logits), ("deepseek_v3", 1, chosen_in_groups)])
@pytest.mark.parametrize("lengths", [None, [3, 17, 32, 40, 40, 8]])
def test_counts_are_those_of_plain_routing_of_the_same_hidden_states(
    family: str, layer: int, choose: Callable[..., list[set[int]]], lengths: list[int] | None
) -> None:
    model = import_checkpoint(Checkpoint.open(CHECKPOINTS / family))
    data = calibration_data(sequences=6, tokens=40, vocab=MODEL.of(model).vocab_size)
    data = data if lengths is None else replace(data, lengths=np.array(lengths))
    tensors = load_file(CHECKPOINTS / family / "model.safetensors")
    gate = f"model.layers.{layer}.mlp.gate"
    inputs = hidden_states(model, data, f"layers.{layer}.mlp.router")
    logits = inputs @ tensors[f"{gate}.weight"].astype(np.float32).T
    chosen = choose(logits, tensors.get(f"{gate}.e_score_correction_bias", np.zeros(1, np.float32)))
    CalibrationEngine(data).count_experts(model)
    found = EXPERT_CHOICES.of(model)
    assert list(found.layers) == [f"layers.{layer}.mlp.combine"]
    own = found.layers[f"layers.{layer}.mlp.combine"]
    assert own.counts == tuple(sum(expert in one for one in chosen) for expert in range(logits.shape[1]))
    ends = np.cumsum(data.row_lengths).tolist()
    windows = [
        len(set[int]().union(*chosen[at : at + 8]))
        for begin, end in zip([0, *ends], ends, strict=False)
        for at in range(begin, end - 7, 8)
    ]
    assert own.consecutive[3] == np.mean(windows)
    groups = [[chosen[begin:end] for begin, end in zip([0, *ends], ends, strict=False)][at::3] for at in range(3)]
    pairs = [len(set.union(*tokens)) for group in groups for tokens in zip(*group, strict=False)]
    assert own.concurrent[1] == np.mean(pairs)
    assert found.tokens == data.tokens


def test_a_model_without_experts_has_no_counts() -> None:
    model = TinyDecoder().model
    calibration().count_experts(model)
    assert EXPERT_CHOICES.find(model) is None


COUNTED = (f"calibration.text={TEXT}", "calibration.sequences=4", "calibration.sequence_tokens=64")


@each_case("engine", ["native", "onnxruntime"])
def test_a_recipe_with_calibration_text_seals_counts_of_experts(
    build_unmeasured: BuildArtifact, upcycled: Path, engine: str
) -> None:
    artifact = build_unmeasured("fp32-cpu", upcycled, "calibration={}", *COUNTED, f"cpu.engine={engine}")
    found = read_expert_choices(artifact)
    assert found is not None
    assert (found.text, found.tokens, len(found.layers)) == (TEXT.name, 4 * 64, 2)
    assert not artifact.has(CALIBRATION_FILE), "no pass was calibrated"


def test_counted_texts_are_as_long_as_a_short_context(build_unmeasured: BuildArtifact, upcycled: Path) -> None:
    settings = ("calibration={}", f"calibration.text={TEXT}", "calibration.sequences=4", "context_tokens=48")
    found = read_expert_choices(build_unmeasured("fp32-cpu", upcycled, *settings, "cpu.engine=native"))
    assert found is not None
    assert found.tokens == 4 * 48


@each_case("setting", ["calibration=null", "calibration.count_experts=false", "calibration.text=null"])
def test_counts_of_experts_are_left_out(build_unmeasured: BuildArtifact, upcycled: Path, setting: str) -> None:
    artifact = build_unmeasured("fp32-cpu", upcycled, "calibration={}", *COUNTED, setting, "cpu.engine=native")
    assert not artifact.has(EXPERTS_FILE)


def test_a_dense_model_does_not_read_the_text_for_counts(tmp_path: Path) -> None:
    missing = [f"checkpoint={DEMO_MODEL}", "calibration={text: none.txt}"]
    compile_recipe(load_recipe("int8-cpu", missing), tmp_path)
    assert not (tmp_path / EXPERTS_FILE).exists()


def test_a_missing_text_for_counts_is_named(upcycled: Path, tmp_path: Path) -> None:
    missing = [f"checkpoint={upcycled}", "calibration={text: none.txt}"]
    with pytest.raises(UsageError, match=r"calibration\.text 'none\.txt' is not a file or folder"):
        compile_recipe(load_recipe("int8-cpu", missing), tmp_path)
