"""`ingot plan` prints what fits, how fast and at what cost, and refuses what it cannot answer with one error."""

import json
from pathlib import Path

import pytest
import yaml

from ingot.cli.main import run
from ingot.planning.service_levels import find_service_level
from tests.conftest import BuildArtifact
from tests.data_paths import FIXTURES

Captured = pytest.CaptureFixture[str]
TINY = FIXTURES / "checkpoints" / "llama"
# Llama-3-70B's own sizes.
LLAMA_3_70B = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-05,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "eos_token_id": 128001,
}


@pytest.fixture
def config(tmp_path: Path) -> str:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA_3_70B))
    return str(file)


def test_a_config_alone_has_the_kv_bytes_of_a_sequence(config: str, capsys: Captured) -> None:
    assert run(["plan", config, "--on", "h100", "--context", "4096", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["kv"]["sequence_bytes"] == 1_342_177_280
    assert figures["model"]["parameters"] == 70_553_706_496
    assert figures["memory"]["fits"] is False
    assert figures["parallelism"]["devices"] == 2


def test_a_plan_in_words_names_its_sources(config: str, capsys: Captured) -> None:
    assert run(["plan", config, "--on", "h100", "--devices", "8", "--slo", "chat", "--batch", "4", "--explain"]) == 0
    shown = capsys.readouterr().out
    for text in (
        "sizes from",
        "NVIDIA H100 data sheet (2023)",
        "service level",
        "FLOP/byte",
        "all-reduces",
        "= weights",
    ):
        assert text in shown


def test_a_level_may_be_limits_and_the_plan_a_page(config: str, tmp_path: Path, capsys: Captured) -> None:
    page = tmp_path / "plan.html"
    words = ["plan", config, "--on", "h100", "--devices", "8", "--html", str(page)]
    assert run([*words, "--slo", "ttft=9,tpot=0.2"]) == 0
    assert "meets ttft=9,tpot=0.2" in capsys.readouterr().out
    assert "Meets ttft=9,tpot=0.2" in page.read_text()
    assert run([*words, "--slo", "ttft=9,tpot=0"]) == 2
    assert "the service level 'ttft=9,tpot=0' is not valid" in capsys.readouterr().err


def test_a_recipe_and_an_artifact_agree(build_unmeasured: BuildArtifact, capsys: Captured) -> None:
    artifact = build_unmeasured("int4-cpu", TINY)
    plans = []
    for words in ([str(artifact.path)], ["int4-cpu", "--checkpoint", str(TINY)], [str(TINY), "--recipe", "int4-cpu"]):
        assert run(["plan", *words, "--on", "epyc-9654", "--context", "32", "--json"]) == 0
        plans.append(json.loads(capsys.readouterr().out))
    sealed, recipe, checkpoint = ({name: plan[name] for name in ("memory", "kv", "latency")} for plan in plans)
    assert sealed == recipe == checkpoint


def test_measured_rows_replace_the_data_sheet(config: str, tmp_path: Path, capsys: Captured) -> None:
    rows = tmp_path / "rows.csv"
    lines = [f"{c},{i},128,{20 + 0.1 * c + 0.001 * c * i}\n" for c in (1, 8, 32) for i in (128, 1024)]
    rows.write_text("concurrency,isl,osl,tpot_ms\n" + "".join(lines))
    assert run(["plan", config, "--on", "h100", "--devices", "8", "--rows", str(rows), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["step_model"]["source"] == f"6 measured rows of {rows}"
    assert figures["latency"]["tpot_seconds"] == pytest.approx(0.0211, rel=0.05)


def test_hardware_is_listed_without_arguments(capsys: Captured) -> None:
    assert run(["plan"]) == 0
    shown = capsys.readouterr().out
    for name in (
        "a100",
        "h200",
        "b300",
        "gb200",
        "l40s",
        "rtx-5090",
        "mi300x",
        "tpu-v5e",
        "trainium2",
        "grace",
        "m4-max",
    ):
        assert name in shown


def test_a_model_of_a_short_context_is_planned_with_all_of_it(config: str, tmp_path: Path, capsys: Captured) -> None:
    values = json.loads(Path(config).read_text())
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**values, "max_position_embeddings": 1024}))
    assert run(["plan", str(file), "--on", "h100", "--json"]) == 0
    load = json.loads(capsys.readouterr().out)["load"]
    assert (load["prompt_tokens"], load["output_tokens"]) == (768, 256)


def test_alerts_have_the_bounds_of_the_level(tmp_path: Path, capsys: Captured) -> None:
    file = tmp_path / "new" / "alerts.yaml"
    assert run(["plan", "--slo", "documents", "--alerts", str(file)]) == 0
    (group,) = yaml.safe_load(file.read_text())["groups"]
    level = find_service_level("documents")
    assert [float(rule["expr"].rpartition(" > ")[2]) for rule in group["rules"]] == [level.ttft, level.tpot]
    assert all(rule["expr"].startswith("histogram_quantile(0.95, ") for rule in group["rules"])
    assert run(["plan", "--alerts", str(file)]) == 2
    assert "name it, such as --slo chat" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--on", "h10"], "unknown hardware 'h10'. Did you mean 'h100'"),
        ([], "name the hardware with --on"),
        (["--on", "h100", "--slo", "chatt"], "unknown service level 'chatt'. Did you mean 'chat'"),
        (["--on", "h100", "--context", "90000"], "the model's context holds 8,192"),
        (["--on", "h100", "--context", "64", "--prompt", "8"], "--context is prompt and output together"),
        (["--on", "h100", "--recipe", "int4-cpu"], "is for a CPU, and h100 is NVIDIA H100"),
        (["--measure"], "--measure runs an artifact"),
        (["--measure", "--on", "h100"], "leave out --on and --rows"),
        (["--on", "h100", "--cached", "2000"], "cached_tokens is 2000 of a prompt of 1024 tokens"),
    ],
)
def test_what_cannot_be_planned_is_one_error(words: list[str], message: str, config: str, capsys: Captured) -> None:
    assert run(["plan", config, *words]) != 0
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("error:") == 1


def test_a_config_without_a_needed_field_is_one_error(tmp_path: Path, capsys: Captured) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"hidden_size": 64}))
    assert run(["plan", str(file), "--on", "h100"]) != 0
    assert "model_type is None" in capsys.readouterr().err


def test_steps_of_an_artifact_are_measured_here(build_unmeasured: BuildArtifact, capsys: Captured) -> None:
    artifact = build_unmeasured("int4-cpu", TINY)
    assert run(["plan", str(artifact.path), "--measure", "--context", "32", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert "measured on this machine" in figures["step_model"]["source"]
    assert figures["latency"]["tpot_seconds"] > 0
