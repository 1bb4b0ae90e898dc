"""The verdict of a manifest: derived from gates and files, the same in its file, and none of an older version's."""

import json
from pathlib import Path

import pytest

from ingot.artifact import (
    MANIFEST,
    ArtifactVerdict,
    ArtifactWriter,
    GateOutcome,
    Program,
    artifact_verdict,
    open_artifact,
    verdict_warning,
)
from ingot.artifact.reader import manifest_digest
from ingot.errors import ArtifactError
from tests.artifact.tiny_artifact import KV, MODEL
from tests.each_case import each_case


def gate(verdict: str, advisory: bool = False) -> GateOutcome:
    facts = {"measured": 0.5, "low": 0.5, "high": 0.5, "limit": 1.0, "bound": "max"}
    return GateOutcome.model_validate({"name": "size_ratio", "verdict": verdict, "advisory": advisory, **facts})


PASSED, ADVISORY = gate("PASS"), gate("FAIL", advisory=True)


def seal_measured(target: Path, *gates: GateOutcome, measured: bool = True) -> Path:
    with ArtifactWriter(target) as writer:
        if measured:
            (writer.path / "evidence").mkdir()
            (writer.path / "evidence" / "summary.json").write_text("{}")
        writer.describe(name="t", model=MODEL, kv=KV, target="cpu", program=Program(), versions={}, gates=gates)
        return writer.seal()


@each_case(
    ("gates", "measured", "verdict"),
    [
        ((), False, "not measured"),
        ((), True, "no gates"),
        ((ADVISORY,), True, "no gates"),
        ((PASSED,), True, "passed"),
        ((PASSED, ADVISORY), True, "passed"),
        ((PASSED, gate("UNDECIDED")), True, "not passed"),
    ],
)
def test_only_gates_that_must_pass_prove_anything(
    gates: tuple[GateOutcome, ...], measured: bool, verdict: ArtifactVerdict
) -> None:
    assert artifact_verdict(gates, measured) == verdict
    warning = verdict_warning(verdict)
    assert (warning is None) if verdict == "passed" else str(warning).startswith(verdict.upper() + ": ")


def test_the_file_states_the_verdict_and_opening_agrees(tmp_path: Path) -> None:
    sealed = {
        "passed": seal_measured(tmp_path / "a", PASSED),
        "no gates": seal_measured(tmp_path / "b", ADVISORY),
        "not measured": seal_measured(tmp_path / "c", measured=False),
    }
    for verdict, folder in sealed.items():
        assert json.loads((folder / MANIFEST).read_text())["verdict"] == verdict
        assert open_artifact(folder).manifest.verdict == verdict
    assert "NOT MEASURED" in str(open_artifact(sealed["not measured"]).manifest.warning)


def reseal(folder: Path, **changes: object) -> None:
    """Change keys of the manifest, None removes one, and make its own digest fit."""
    values = json.loads((folder / MANIFEST).read_text()) | changes
    values = {key: value for key, value in values.items() if value is not None or key not in changes}
    (folder / MANIFEST).write_text(json.dumps({**values, "digest": manifest_digest(values)}))


def test_a_verdict_that_gates_and_files_do_not_support_is_refused(tmp_path: Path) -> None:
    folder = seal_measured(tmp_path / "a", measured=False)
    reseal(folder, verdict="passed")
    with pytest.raises(ArtifactError, match="verdict is 'passed', but gates and files say 'not measured'"):
        open_artifact(folder)


def test_a_manifest_of_a_version_without_verdicts_and_advisory_gates_opens(tmp_path: Path) -> None:
    folder = seal_measured(tmp_path / "a", PASSED)
    gates = [PASSED.model_dump(mode="json", exclude={"advisory"})]
    reseal(folder, verdict=None, gates=gates)
    assert "verdict" not in json.loads((folder / MANIFEST).read_text())
    manifest = open_artifact(folder).manifest
    assert (manifest.verdict, manifest.gates) == ("passed", (PASSED,))
    reseal(folder, gates=[])
    assert open_artifact(folder).manifest.verdict == "no gates"
