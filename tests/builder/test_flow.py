"""A build is sealed only if its gates pass; a rejected one keeps its evidence and changes nothing else."""

import shutil
from pathlib import Path

import pytest

from ingot.artifact import open_artifact
from ingot.builder import BuildResult, Observers, build
from ingot.builder.flow import rejected_folder, unchanged
from ingot.errors import GateFailed, RecipeError, UsageError
from ingot.passes.manager import PassRecord
from ingot.validation.evidence import Evidence
from ingot.validation.evidence_json import sealed_verification
from ingot.validation.verify import FEATURES, cell_names, matrix
from tests.conftest import UNMEASURED
from tests.data_paths import FIXTURES

pytestmark = pytest.mark.usefixtures("memory_of_this_process")

TINY = (f"checkpoint={FIXTURES / 'checkpoints' / 'llama'}", "evaluation=null", "latency=null", "generate=null")


def build_tiny(output: Path, limit: float, observers: Observers | None = None) -> BuildResult:
    """Build the tiny llama with a gate on its size, which is equal to its baseline's."""
    return build("fp32-cpu", [*TINY, f"gates={{size_ratio: {{max: {limit}}}}}"], output, observers)


def test_a_passed_gate_seals_the_artifact_with_its_evidence(tmp_path: Path) -> None:
    reports: list[Path] = []
    result = build_tiny(tmp_path / "out", 1.5, Observers(measured=lambda evidence, report: reports.append(report)))
    assert result.artifact.path == tmp_path / "out"
    assert [gate.verdict for gate in open_artifact(tmp_path / "out").manifest.gates] == ["PASS"]
    assert result.evidence is not None
    assert result.evidence.measured["size_ratio"].estimate.value == pytest.approx(1, abs=0.2)
    assert reports == [tmp_path / "out" / "evidence" / "report.html"]
    assert reports[0].is_file()


def test_a_failed_gate_keeps_the_older_artifact_and_the_evidence_until_the_next_build(tmp_path: Path) -> None:
    before = build_tiny(tmp_path / "out", 1.5).artifact.manifest
    measured: list[tuple[Evidence, Path]] = []
    observers = Observers(measured=lambda evidence, report: measured.append((evidence, report)))
    with pytest.raises(GateFailed, match="size_ratio"):
        build_tiny(tmp_path / "out", 0.1, observers)
    rejected = rejected_folder(tmp_path / "out")
    assert rejected == tmp_path / "out.rejected"
    assert sorted(entry.name for entry in rejected.iterdir()) == ["evidence", "recipe.yaml"]
    [(evidence, report)] = measured
    assert [gate.verdict for gate in evidence.gates] == ["FAIL"]
    assert report == rejected / "evidence" / "report.html"
    assert report.is_file()
    assert open_artifact(tmp_path / "out").manifest == before
    build_tiny(tmp_path / "out", 1.5)
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_an_unmeasured_build_has_no_evidence_and_its_observer_sees_every_pass(tmp_path: Path) -> None:
    seen: list[str] = []

    def after_pass(model: object, record: PassRecord) -> None:
        seen.append(record.name)

    result = build("fp32-cpu", [*TINY, *UNMEASURED], tmp_path / "out", Observers(after_pass=after_pass))
    assert result.evidence is None
    assert result.artifact.manifest.gates == ()
    assert seen == [record.name for record in result.compiled.passes]
    assert "fuse-rotary-attention" in seen


def test_a_length_beyond_the_context_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ingot.builder.flow.ArtifactWriter", None)  # a build that begins would call it
    with pytest.raises(RecipeError, match=r"latency\.prompt_tokens \+ latency\.output_tokens is 4160, and the model's"):
        build("fp32-cpu", [*TINY, "latency={prompt_tokens: 4096}"], tmp_path / "out")
    with pytest.raises(RecipeError, match=r"2 problems in --set:chat_template, --set:gpu\.tiles"):
        build("fp32-cpu", [*TINY, "chat_template=none.jinja", "gpu.tiles=none.json"], tmp_path / "out")


def test_the_identity_covers_the_chat_template_and_not_its_name(tmp_path: Path) -> None:
    identities = []
    for name, text in (("a.jinja", "one"), ("b.jinja", "one"), ("a.jinja", "two")):
        (tmp_path / name).write_text(text)
        template = f"chat_template={tmp_path / name}"
        identities.append(
            build("fp32-cpu", [*TINY, *UNMEASURED, template], tmp_path / "out").artifact.manifest.identity
        )
    assert identities[0] == identities[1] != identities[2]


def test_shortened_lengths_are_sealed(tmp_path: Path) -> None:
    result = build("fp32-cpu", [*TINY, *UNMEASURED], tmp_path / "out")
    assert result.recipe.memory is not None
    assert result.recipe.memory.prompt_tokens + result.recipe.memory.output_tokens < 64
    assert result.artifact.file("recipe.yaml").read_text() == result.recipe.resolved_yaml()


def test_a_recipe_with_problems_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no-such-pass"):
        build("fp32-cpu", [*TINY, "passes=[no-such-pass]"], tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def seals_what_was_verified(folder: Path) -> bool:
    """Build with a gate on the runtime; True if what is sealed are the cells of all pairs of features."""
    result = build("fp32-cpu", [*TINY, "gates={verify: true}", "engine.block_tokens=4"], folder / "out")
    assert [(gate.name, gate.verdict) for gate in result.artifact.manifest.gates] == [("verify", "PASS")]
    assert result.evidence
    assert result.evidence.verification
    repeats = {cell.repeat.partition(" --quick")[0] for cell in result.evidence.verification.cells if cell.repeat}
    assert repeats == {"ingot verify ARTIFACT"}, (
        "the recipe's name is not a path, and evidence has no path of a machine"
    )
    sealed = sealed_verification(result.artifact)
    assert sealed is not None
    assert sealed.verdict == "PASS"
    assert sealed.identity == result.artifact.manifest.identity
    return {cell.name for cell in sealed.cells} == {
        "+".join(cell) for cell in cell_names(FEATURES.values(), quick=True)
    }


def test_a_gate_on_the_runtime_seals_what_was_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = {name: FEATURES[name] for name in ("prefix-hit", "chunked-prefill", "preemption")}
    monkeypatch.setattr(matrix, "FEATURES", few)
    assert not seals_what_was_verified(tmp_path)


# A proof: see .ci/proofs.toml.
def test_a_gate_on_the_runtime_verifies_every_pair(tmp_path: Path) -> None:
    assert seals_what_was_verified(tmp_path)


def test_a_build_of_the_same_inputs_is_unchanged_and_one_of_others_is_not(tmp_path: Path) -> None:
    gates = "gates={size_ratio: {max: 1.5}}"
    assert unchanged("fp32-cpu", [*TINY, gates], tmp_path / "out") is None
    built = build_tiny(tmp_path / "out", 1.5).artifact.manifest
    last = unchanged("fp32-cpu", [*TINY, gates], tmp_path / "out")
    assert last is not None
    assert last.artifact is not None
    assert (last.artifact.manifest, last.gates) == (built, built.gates)
    assert unchanged("fp32-cpu", [*TINY, gates, "seed=1"], tmp_path / "out") is None
    weights = next((tmp_path / "out/program").glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert unchanged("fp32-cpu", [*TINY, gates], tmp_path / "out") is None, "a damaged artifact is built again"


def test_a_changed_checkpoint_or_text_is_not_the_same_input(tmp_path: Path) -> None:
    checkpoint, text = tmp_path / "model", tmp_path / "text.txt"
    shutil.copytree(FIXTURES / "checkpoints/llama", checkpoint)
    text.write_text("a text of its own, " * 40)
    settings = [f"checkpoint={checkpoint}", f"chat_template={text}", "generate=null", *UNMEASURED]
    build("fp32-cpu", settings, tmp_path / "out")
    assert unchanged("fp32-cpu", settings, tmp_path / "out") is not None
    config = checkpoint / "config.json"
    before = config.read_text()
    config.write_text(f"{before} ")
    assert unchanged("fp32-cpu", settings, tmp_path / "out") is None
    config.write_text(before)
    assert unchanged("fp32-cpu", settings, tmp_path / "out") is not None
    text.write_text("another text")
    assert unchanged("fp32-cpu", settings, tmp_path / "out") is None


def test_an_unchanged_build_that_its_gates_rejected_is_rejected_again(tmp_path: Path) -> None:
    with pytest.raises(GateFailed):
        build_tiny(tmp_path / "out", 0.1)
    last = unchanged("fp32-cpu", [*TINY, "gates={size_ratio: {max: 0.1}}"], tmp_path / "out")
    assert last is not None
    assert last.artifact is None
    assert [gate.verdict for gate in last.gates] == ["FAIL"]
    (tmp_path / "out.rejected/evidence/summary.json").write_text('{"gates": [{"name": 1}]}')
    assert unchanged("fp32-cpu", [*TINY, "gates={size_ratio: {max: 0.1}}"], tmp_path / "out") is None


def test_an_artifact_that_passed_is_not_replaced_by_one_without_gates_unless_forced(tmp_path: Path) -> None:
    before = build_tiny(tmp_path / "out", 1.5).artifact.manifest
    with pytest.raises(UsageError, match=r"out: the gates of this artifact passed, .* or replace it with --force"):
        build("fp32-cpu", [*TINY, *UNMEASURED], tmp_path / "out")
    assert open_artifact(tmp_path / "out").manifest == before
    forced = build("fp32-cpu", [*TINY, *UNMEASURED], tmp_path / "out", force=True)
    assert forced.artifact.manifest.verdict == "not measured"
    build_tiny(tmp_path / "out", 1.5)
