"""`ingot build`: what it prints where, that observers do not change the result, and the table of mixed-precision."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ingot.artifact import open_artifact
from ingot.cli.main import run
from tests.conftest import UNMEASURED
from tests.data_paths import DEMO_MODEL, FIXTURES, ROOT

pytestmark = pytest.mark.usefixtures("memory_of_this_process")

Captured = pytest.CaptureFixture[str]
UNMEASURED_DEMO = ["demo", *(part for setting in (*UNMEASURED, "generate=null") for part in ("--set", setting))]
SHORT = ("evaluation.tokens=256", "evaluation.window_tokens=64")
WATCHED = ["--print-ir-after", "all", "--save-ir", "ir", "--time-passes", "--json"]


def contents(artifact: Path) -> dict[str, bytes]:
    return {str(file.relative_to(artifact)): file.read_bytes() for file in artifact.rglob("*") if file.is_file()}


def build_elsewhere(output: Path, hash_seed: int, *options: str) -> subprocess.CompletedProcess[bytes]:
    """Build in a process of its own, whose working folder is next to the output."""
    output.parent.mkdir(parents=True)
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed), "INGOT_THREADS": str(1 + hash_seed % 2)}
    command = [sys.executable, "-m", "ingot", "build", *UNMEASURED_DEMO, "-o", output.name, *options]
    return subprocess.run(command, cwd=output.parent, env=environment, capture_output=True, check=True, timeout=300)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("plain") / "here" / "demo"
    build_elsewhere(output, hash_seed=1)
    return output


def test_a_build_has_the_same_bytes_in_another_folder_process_and_thread_count_watched_or_not(
    plain: Path, tmp_path: Path
) -> None:
    output = tmp_path / "a b" / "ü" / "demo"
    done = build_elsewhere(output, 78, *WATCHED)
    assert contents(output) == contents(plain)
    assert open_artifact(output).manifest == open_artifact(plain).manifest
    facts = json.loads(done.stdout)
    assert facts["identity"] == open_artifact(plain).manifest.identity
    saved = sorted((output.parent / "ir").iterdir())
    assert [file.name for file in saved] == [f"{n:02}-{made['name']}.txt" for n, made in enumerate(facts["passes"])]
    assert all(file.read_text(encoding="utf-8") in done.stderr.decode() for file in saved)


def test_the_saved_ir_reads_as_lines_of_inputs_weights_nodes_and_outputs(tmp_path: Path) -> None:
    assert run(["build", *UNMEASURED_DEMO, "-o", str(tmp_path / "demo"), "--save-ir", str(tmp_path / "ir")]) == 0
    text = (tmp_path / "ir/03-quantize-weights.txt").read_text(encoding="utf-8")
    assert text.startswith("ingot.checkpoint stdlib-llama-6m\n")
    assert "input  input_ids: INT64[T]\n" in text
    assert "weight model.layers.0.self_attn.qkv_proj.weight.q: UINT4[512,256]\n" in text
    assert "%layers.0.mlp.down_proj = Gemm(" in text
    assert text.endswith("output logits: FLOAT[R,4096]\n")


def test_ir_and_times_are_printed_plain(tmp_path: Path, capsys: Captured) -> None:
    options = ["--print-ir-after", "pack-projections", "--print-ir-after", "fuse-residual-norm", "--time-passes"]
    assert run(["build", *UNMEASURED_DEMO, "-o", str(tmp_path / "demo"), *options]) == 0
    shown = capsys.readouterr()
    assert shown.out.count("== IR after ") == 1
    assert "== IR after pack-projections ==\ningot.checkpoint" in shown.out
    assert "\nfuse-rotary-attention " in shown.out
    assert f"sealed {tmp_path / 'demo'} (" in shown.out
    assert "--print-ir-after: this build has no pass 'fuse-residual-norm'; it ran fold-constants, " in shown.err
    assert "\x1b" not in shown.out + shown.err


def test_a_quiet_build_says_what_it_sealed_and_that_nothing_was_measured(tmp_path: Path, capsys: Captured) -> None:
    assert run(["build", *UNMEASURED_DEMO, "-o", str(tmp_path / "demo"), "--quiet"]) == 0
    shown = capsys.readouterr()
    first, second = shown.out.splitlines()
    assert first.startswith("sealed ")
    assert second.startswith("NOT MEASURED: ")
    assert shown.err == ""


def test_the_command_to_type_next_is_one_that_the_shell_finds(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["here/bin/ingot"])
    monkeypatch.setenv("PATH", str(tmp_path))
    output = str(tmp_path / "my demo")
    assert run(["build", *UNMEASURED_DEMO, "-o", output]) == 0
    assert capsys.readouterr().err == f"next: here/bin/ingot run '{output}'\n"


def test_a_measured_build_prints_json_alone(two_layers: Path, tmp_path: Path, capsys: Captured) -> None:
    settings = [f"checkpoint={two_layers}", "latency=null", "gates={}", *SHORT, "evaluation.layer_kl_tokens=64"]
    options = [part for setting in settings for part in ("--set", setting)]
    assert run(["build", "demo", *options, "-o", str(tmp_path / "demo"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["total_bytes"] == open_artifact(tmp_path / "demo").total_bytes
    assert facts["evidence"]["metrics"]["top1_agreement"]["value"] > 0.5


def test_a_build_that_its_gates_refuse_prints_what_was_measured_as_json(
    two_layers: Path, tmp_path: Path, capsys: Captured
) -> None:
    settings = [
        f"checkpoint={two_layers}",
        "latency=null",
        "gates={kl_mean: {max: 0}}",
        *SHORT,
        "evaluation.layer_kl_tokens=0",
    ]
    options = [part for setting in settings for part in ("--set", setting)]
    assert run(["build", "demo", *options, "-o", str(tmp_path / "demo"), "--json"]) == 3
    shown = capsys.readouterr()
    facts = json.loads(shown.out)
    assert facts["artifact"] is None
    assert Path(facts["report"]).is_file()
    assert [gate["verdict"] for gate in facts["evidence"]["gates"]] == ["FAIL"]
    assert "gate failed: kl_mean" in shown.err


def test_the_sample_is_shown_after_the_seal(tmp_path: Path, capsys: Captured) -> None:
    settings = [f"checkpoint={DEMO_MODEL}", *UNMEASURED, "generate={prompt: 'def f', max_tokens: 4}"]
    options = [part for setting in settings for part in ("--set", setting)]
    assert run(["build", "fp32-cpu", *options, "-o", str(tmp_path / "mine")]) == 0
    shown = capsys.readouterr()
    assert "\ndef f" in shown.out
    assert shown.err.splitlines()[-1] == f"next: ingot run {tmp_path / 'mine'} 'def f'"


RECIPE = f"""\
calibration: {{text: {ROOT / "README.md"}, sequences: 4, sequence_tokens: 64}}
evaluation: {{text: {ROOT / "CHANGELOG.md"}, tokens: 64, window_tokens: 32, layer_kl_tokens: 0}}
passes:
  - mixed-precision: {{bits: [4, 8], block_sizes: [64], points: 1, tokens: 64, budget_bits: 6.0}}
  - quantize-weights
"""


def test_the_table_and_the_prediction_are_printed(two_layers: Path, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "mine.yaml").write_text(f"checkpoint: {two_layers}\n{RECIPE}")
    assert run(["build", str(tmp_path / "mine.yaml"), "-o", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr()
    assert "Mixed precision: KL in nats per token, of each weight alone" in shown.out
    assert "layers.1.mlp.down_proj" in shown.out
    assert "mixed-precision predicted a KL of" in shown.err.replace("\n", " ")


def test_json_stays_json(two_layers: Path, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "mine.yaml").write_text(f"checkpoint: {two_layers}\n{RECIPE}")
    assert (
        run(["build", str(tmp_path / "mine.yaml"), "--json", "--set", "evaluation=null", "-o", str(tmp_path / "out")])
        == 0
    )
    assert "mixed-precision" in [row["name"] for row in json.loads(capsys.readouterr().out)["passes"]]


def test_required_gates_are_required_before_any_work(tmp_path: Path, capsys: Captured) -> None:
    command = ["build", *UNMEASURED_DEMO, "-o", str(tmp_path / "out"), "--require-gates"]
    assert run(command) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert "recipe demo measures nothing, and gates are required (--require-gates)" in shown
    assert list(tmp_path.iterdir()) == []


def test_if_changed_ends_with_the_verdict_of_the_last_build(tmp_path: Path, capsys: Captured) -> None:
    tiny = ["evaluation=null", "latency=null", "generate=null"]
    words = ["build", "fp32-cpu", str(FIXTURES / "checkpoints/llama"), "-o", str(tmp_path / "out"), "--if-changed"]
    words += [part for setting in tiny for part in ("--set", setting)]
    for limit, code in ((1.5, 0), (0.1, 3)):
        gated = [*words, "--set", f"gates={{size_ratio: {{max: {limit}}}}}"]
        assert run(gated) == code
        assert "unchanged" not in capsys.readouterr().out
        assert run([*gated, "--junit", str(tmp_path / "gates.xml")]) == code
        assert 'name="size_ratio"' in (tmp_path / "gates.xml").read_text()
        shown = capsys.readouterr()
        assert "size_ratio" in shown.out
        assert f"unchanged {tmp_path / 'out'}" in shown.out or "since the gates rejected the last build" in shown.err
