"""Recipe: paths, baseline, and the resolved text that is part of an artifact's identity."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from ingot.artifact.metrics import METRICS
from ingot.errors import RecipeError, UsageError
from ingot.pipeline.recipe.load import load_recipe
from ingot.pipeline.recipe.schema import Recipe
from ingot.pipeline.recipe.sections import RecipePath


def written(folder: Path, text: str, name: str = "mine.yaml") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_the_baseline_is_built_for_the_engine_of_the_artifact() -> None:
    recipe = load_recipe("int4-cpu", ["checkpoint=m", "cpu.engine=auto"])
    assert recipe.for_engine("native").baseline().cpu.engine == "native"
    assert recipe.for_engine("onnxruntime").baseline().cpu.engine == "onnxruntime"
    assert recipe.for_engine("cuda") is recipe


def test_the_baseline_attends_in_float32() -> None:
    recipe = load_recipe("int4-cpu", ["checkpoint=m", "cpu={engine: native, attention: bfloat16}"])
    assert recipe.for_engine("native").baseline().cpu.attention == "float32"


def test_attention_in_bfloat16_needs_the_native_engine() -> None:
    with pytest.raises(
        RecipeError, match="attention is bfloat16, which engine onnxruntime does not compute: set engine"
    ):
        load_recipe("int4-cpu", ["cpu={engine: onnxruntime, attention: bfloat16}"])


def test_a_recipe_is_frozen() -> None:
    recipe: Any = load_recipe("fp32-cpu")
    with pytest.raises(ValidationError, match="frozen"):
        recipe.target = "other"


def test_a_recipe_knows_which_keys_were_given() -> None:
    recipe = load_recipe("demo", ["latency.slo={ttft_seconds: 1, tpot_seconds: 1}", "calibration={}"])
    assert recipe.sets("evaluation.window_tokens")
    assert recipe.sets("latency.slo.ttft_seconds")
    assert not recipe.sets("calibration.sequence_tokens")
    assert not recipe.sets("memory.probes")
    assert not recipe.sets("threads")


def test_equal_recipes_are_equal_wherever_they_are_written(tmp_path: Path) -> None:
    one, other = (written(tmp_path / folder, "seed: 3") for folder in "ab")
    assert load_recipe(one) == load_recipe(other)


def test_paths_are_relative_to_the_file_that_contains_them(tmp_path: Path) -> None:
    (tmp_path / "base" / "model").mkdir(parents=True)
    written(tmp_path / "base" / "model", "text", "held.txt")
    written(tmp_path / "base", "checkpoint: ./model\nevaluation: {text: model/held.txt}", "base.yaml")
    recipe = load_recipe(written(tmp_path / "other", "extends: ../base/base.yaml"))
    assert recipe.require_checkpoint() == tmp_path / "base" / "model"
    assert recipe.evaluation_text() == tmp_path / "base" / "model" / "held.txt"


def test_paths_of_overrides_are_relative_to_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    assert load_recipe("int4-cpu", ["checkpoint=model"]).require_checkpoint() == tmp_path / "model"


def test_the_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert RecipePath("~/m", Path("elsewhere")).path == tmp_path / "m"


def test_a_text_in_the_checkpoint_folder_is_found(tmp_path: Path) -> None:
    written(tmp_path / "model", "text", "held.txt")
    recipe = load_recipe(written(tmp_path, "checkpoint: model\nevaluation: {text: 'checkpoint:held.txt'}"))
    assert recipe.evaluation_text() == tmp_path / "model" / "held.txt"
    assert load_recipe("fp32-cpu").evaluation_text() is None


def test_a_recipe_without_a_checkpoint_says_how_to_give_one() -> None:
    with pytest.raises(UsageError, match="recipe int4-cpu names no checkpoint; set it with --set checkpoint=FOLDER"):
        load_recipe("int4-cpu").require_checkpoint()


def test_a_missing_checkpoint_or_text_is_named(tmp_path: Path) -> None:
    recipe = load_recipe(written(tmp_path, "checkpoint: nope\nevaluation: {text: gone.txt}"))
    with pytest.raises(UsageError, match=r"checkpoint 'nope' is not a folder or GGUF file \(looked for .*nope\)"):
        recipe.require_checkpoint()
    with pytest.raises(UsageError, match=r"evaluation\.text 'gone\.txt' is not a file"):
        recipe.evaluation_text()


def test_a_recipe_without_calibration_text_says_how_to_give_one() -> None:
    with pytest.raises(UsageError, match=r"names no calibration text; set it with --set calibration\.text=FILE"):
        load_recipe("int4-gptq-cpu").calibration_text()


def test_a_calibration_text_may_be_a_folder_and_an_evaluation_text_may_not(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    recipe = load_recipe(written(tmp_path, "calibration: {text: texts}\nevaluation: {text: texts}"))
    assert recipe.calibration_text() == tmp_path / "texts"
    with pytest.raises(UsageError, match=r"evaluation\.text 'texts' is not a file \(looked for"):
        recipe.evaluation_text()


def test_the_output_folder_is_named_after_the_recipe_unless_it_is_set() -> None:
    assert load_recipe("int4-cpu").output_folder == Path("artifacts/int4-cpu")
    assert load_recipe("int4-cpu", ["output=out/x"]).output_folder == Path("out/x")


def test_the_baseline_has_the_same_passes_without_quantization() -> None:
    baseline = load_recipe("int4-cpu", ["checkpoint=m", "context_tokens=64"]).baseline()
    assert [entry.name for entry in baseline.passes] == [e.name for e in load_recipe("fp32-cpu").passes]
    assert baseline.context_tokens == 64
    assert baseline.gates == {}
    assert baseline.baseline() == baseline


def test_recipes_that_differ_in_quantization_and_measurement_share_a_baseline() -> None:
    given = ["checkpoint=m"]
    texts = {
        load_recipe(name, [*given, *more]).baseline().resolved_yaml()
        for name, more in [("int4-cpu", []), ("int8-cpu", []), ("fp32-cpu", []), ("int4-cpu", ["latency={}", "seed=4"])]
    }
    assert len(texts) == 1


def test_the_resolved_text_is_the_same_on_any_machine(tmp_path: Path) -> None:
    texts = set()
    for folder in ("a", "b/c"):
        source = written(tmp_path / folder, f"checkpoint: {tmp_path / folder / 'model'}\nevaluation: {{text: x/t.txt}}")
        text = load_recipe(source, [f"output={tmp_path}/out"]).resolved_yaml()
        assert str(tmp_path) not in text
        texts.add(text)
    assert len(texts) == 1


def test_the_resolved_text_has_every_default_and_reads_back_as_the_same_recipe(tmp_path: Path) -> None:
    recipe = load_recipe("demo", ["latency.slo={ttft_seconds: 1, tpot_seconds: 0.5}"])
    text = recipe.resolved_yaml()
    data = yaml.safe_load(text)
    left_out = ("output", "serving", "devices", "place", "stream_experts")
    assert list(data) == [key for key in Recipe.model_fields if key not in left_out]
    assert data["engine"] == {"max_batch_tokens": 512, "block_tokens": 16}
    quantize = next(entry["quantize-weights"] for entry in data["passes"] if "quantize-weights" in entry)
    assert quantize["symmetric"] is False, "options that the recipe leaves out are filled in"
    assert load_recipe(written(tmp_path, text)).resolved_yaml() == text


def test_counts_of_experts_are_in_the_resolved_text_where_they_are_turned_off(tmp_path: Path) -> None:
    def resolved(*overrides: str) -> str:
        return load_recipe("int4-gptq-cpu", ["calibration.text=t.txt", *overrides]).resolved_yaml()

    assert resolved("calibration.count_experts=true") == resolved()
    assert "count_experts" not in resolved()
    off = resolved("calibration.count_experts=false")
    assert yaml.safe_load(off)["calibration"]["count_experts"] is False
    assert load_recipe(written(tmp_path, off)).resolved_yaml() == off


def test_serving_is_shown_but_is_not_in_the_text_that_the_identity_covers() -> None:
    recipe = load_recipe("int4-cpu", ["serving.kv_host_bytes=4GiB", "serving.max_sequences=8"])
    assert recipe.resolved_yaml() == load_recipe("int4-cpu").resolved_yaml()
    assert yaml.safe_load(recipe.resolved_yaml(with_serving=True))["serving"] == {
        "max_batch_tokens": None,
        "max_sequences": 8,
        "kv_bytes": None,
        "kv_offload": None,
        "kv_offload_to": None,
        "kv_host_bytes": 4 << 30,
        "kv_disk_bytes": None,
        "kv_policy": None,
        "kv_restore": None,
        "cpu_affinity": None,
        "weights": None,
    }
    assert load_recipe("int4-cpu", ["serving={kv_policy: arc}", "serving=null"]).serving is None
    assert recipe.baseline().serving is None


def applied(*overrides: str, recipe: str = "int4-cpu") -> dict[str, float]:
    return {metric: gate.limit for metric, gate in load_recipe(recipe, overrides).applied_gates.items()}


def test_gates_if_measured_are_left_out_where_nothing_measures_them() -> None:
    text = "evaluation={text: t.txt}"
    assert not load_recipe("int4-cpu").is_measured
    assert applied() == {}
    assert applied(text) == {"perplexity_ratio": 1.1, "kl_mean": 0.1}
    assert applied(text, recipe="int8-cpu") == {"perplexity_ratio": 1.01, "kl_mean": 0.01}
    assert applied(text, "gates.kl_mean=null") == {"perplexity_ratio": 1.1}
    size = "gates={size_ratio: {max: 0.3, if_measured: true}}"
    assert (applied(size), applied(size, "latency={}")) == ({}, {"size_ratio": 0.3})
    level = "gates={tpot_ratio@4: {max: 1, if_measured: true}}"
    assert applied("latency={concurrency: [1]}", level) == {}
    assert applied("latency={concurrency: [1, 4]}", level) == {"tpot_ratio@4": 1.0}


def test_a_limit_of_ones_own_must_be_measured(tmp_path: Path) -> None:
    own = written(tmp_path, "extends: int4-cpu\ngates: {kl_mean: {max: 0.05}}")
    for source, overrides in ((own, []), ("int4-cpu", ["gates.kl_mean.max=0.05"])):
        with pytest.raises(RecipeError, match="kl_mean requires the section `evaluation`"):
            load_recipe(source, overrides)
        recipe = load_recipe(source, ["evaluation={text: t.txt}", *overrides])
        assert (recipe.gates["kl_mean"].limit, recipe.gates["kl_mean"].if_measured) == (0.05, False)


def test_a_gate_may_become_advisory_without_another_limit() -> None:
    gate = load_recipe("int4-cpu", ["gates.kl_mean.advisory=true"]).gates["kl_mean"]
    assert (gate.limit, gate.advisory, gate.if_measured) == (0.1, True, True)


def test_no_gate_of_the_demo_on_latency_keeps_anyone_from_its_artifact() -> None:
    gates = load_recipe("demo").gates
    latency = [gate for metric, gate in gates.items() if METRICS[metric.partition("@")[0]].section == "latency"]
    assert latency
    assert all(gate.advisory for gate in latency)
    assert not all(gate.advisory for gate in gates.values())
