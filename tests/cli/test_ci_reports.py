"""--junit and --summary: files for a CI system, written however a command ends."""

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from ingot.artifact import GateOutcome
from ingot.cli.ci_reports import CIReports
from ingot.cli.main import run
from ingot.errors import BuildError, GateFailed, UsageError
from ingot.validation.statistics import Estimate, Measured
from tests.conftest import BuildArtifact
from tests.validation.sample_evidence import sample_evidence

Captured = pytest.CaptureFixture[str]


def gate(name: str, verdict: str, advisory: bool = False) -> GateOutcome:
    facts = {"measured": 1.0, "low": 0.9, "high": 1.1, "limit": 1.05, "bound": "max"}
    return GateOutcome.model_validate({"name": name, "verdict": verdict, "advisory": advisory, **facts})


def suite_of(file: Path) -> ET.Element:
    root = ET.parse(file).getroot()
    (suite,) = root
    assert (root.tag, suite.tag) == ("testsuites", "testsuite")
    cases = suite.findall("testcase")
    assert suite.get("tests") == str(len(cases))
    for attribute, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        assert suite.get(attribute) == str(sum(case.find(tag) is not None for case in cases))
    return suite


def outcomes(suite: ET.Element) -> dict[str, str]:
    """Test case -> failure, error or skipped, or passed."""
    tags = ("failure", "error", "skipped")
    return {
        str(case.get("name")): next((tag for tag in tags if case.find(tag) is not None), "passed")
        for case in suite.findall("testcase")
    }


def test_each_gate_is_a_test_case_and_so_is_what_got_worse_without_one(tmp_path: Path) -> None:
    gates = (gate("a", "PASS"), gate("b", "FAIL"), gate("c", "UNDECIDED"), gate("d", "FAIL", advisory=True))
    worse = Measured("ttft_ratio", Estimate(1.14, 1.1, 1.2, 5, "t"), level=1)
    limited = Measured("tpot_ratio", Estimate(1.14, 1.1, 1.2, 5, "t"))
    measured = {
        "ttft_ratio@1": worse,
        "a": limited,
        "size_ratio": Measured("size_ratio", Estimate(0.5, 0.5, 0.5, 1, "t")),
    }
    evidence = replace(sample_evidence(), gates=gates, measured=measured)
    with pytest.raises(GateFailed), CIReports("ingot build demo", tmp_path / "gates.xml", None) as reports:
        reports.measured(evidence)
        raise GateFailed("b")
    suite = suite_of(tmp_path / "gates.xml")
    assert outcomes(suite) == {
        "a": "passed",
        "b": "failure",
        "c": "failure",
        "d": "skipped",
        "ttft_ratio@1": "skipped",
    }
    kinds = [failure.get("type") for failure in suite.iter("failure")]
    assert kinds == ["FAIL", "UNDECIDED"]
    messages = [str(skipped.get("message")) for skipped in suite.iter("skipped")]
    assert messages[0].startswith("FAIL (advisory): d is 1 (95 % interval 0.9 to 1.1)")
    assert messages[1] == "significantly worse than the baseline: 1.140 (1.100 to 1.200); no gate limits it"
    assert {one.get("name"): one.get("value") for one in suite.iter("property")}["verdict"] == "FAIL"


def test_an_error_is_a_test_case_and_what_xml_cannot_hold_is_an_escape(tmp_path: Path) -> None:
    with pytest.raises(BuildError), CIReports("ingot build demo", tmp_path / "gates.xml", tmp_path / "out.md"):
        raise BuildError("no room for <weights> \x1b[2J\udcff\nfree some")
    suite = suite_of(tmp_path / "gates.xml")
    assert outcomes(suite) == {"build": "error"}
    (error,) = suite.iter("error")
    assert (error.get("type"), error.get("message")) == ("BuildError", "no room for <weights> \\x1b[2J\\udcff")
    assert str(error.text).endswith("\nfree some")
    text = (tmp_path / "out.md").read_text(encoding="utf-8")
    assert text.startswith("## ingot build demo: error\n\n    no room for <weights> \\x1b[2J")


def test_a_mistake_of_ours_is_an_error_too(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), CIReports("ingot build demo", tmp_path / "gates.xml", None):
        raise ZeroDivisionError
    assert outcomes(suite_of(tmp_path / "gates.xml")) == {"build": "error"}


def test_the_summary_is_appended(tmp_path: Path) -> None:
    file = tmp_path / "summary.md"
    file.write_text("# Mine\n")
    for _ in range(2):
        with CIReports("ingot build demo", None, file) as reports:
            reports.measured(sample_evidence())
    text = file.read_text(encoding="utf-8")
    assert text.startswith("# Mine\n")
    assert text.count("| metric |") == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [("", "is a folder; name a file"), ("no/such/x.xml", "there is no folder .*no/such; make it first")],
)
def test_a_file_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message), CIReports("ingot build demo", tmp_path / name, None):
        pytest.fail("the work began")


def test_a_full_disk_does_not_hide_the_error(capsys: Captured) -> None:
    with pytest.raises(BuildError, match="why"), CIReports("ingot build demo", Path("/dev/full"), None):
        raise BuildError("why")
    assert (
        capsys.readouterr().err == "warning: --junit /dev/full: the file cannot be written: No space left on device\n"
    )


def test_a_wrong_command_line_is_reported_as_well(tmp_path: Path, capsys: Captured) -> None:
    files = ["--junit", str(tmp_path / "gates.xml"), "--summary", str(tmp_path / "out.md")]
    assert run(["build", "no-such-recipe", *files]) == 2
    assert outcomes(suite_of(tmp_path / "gates.xml")) == {"build": "error"}
    assert "unknown recipe" in (tmp_path / "out.md").read_text(encoding="utf-8")


def test_checking_digests_reports_the_sealed_gates(build_unmeasured: BuildArtifact, tmp_path: Path) -> None:
    files = ["--junit", str(tmp_path / "gates.xml"), "--summary", str(tmp_path / "out.md")]
    assert run(["validate", str(build_unmeasured("int4-cpu").path), *files]) == 0
    assert outcomes(suite_of(tmp_path / "gates.xml")) == {"validate": "passed"}
    assert "Nothing was measured." in (tmp_path / "out.md").read_text(encoding="utf-8")
    with CIReports("ingot validate x", tmp_path / "gates.xml", tmp_path / "more.md") as reports:
        reports.decided([gate("a", "PASS"), gate("b", "UNDECIDED", advisory=True)])
    assert outcomes(suite_of(tmp_path / "gates.xml")) == {"a": "passed", "b": "skipped"}
    assert "- **UNDECIDED (advisory)** b is 1 (95" in (tmp_path / "more.md").read_text(encoding="utf-8")
