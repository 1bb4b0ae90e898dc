"""Files for a CI system: --junit has a test case per gate, --summary the evidence as Markdown.

Both are also written when a gate fails or the command ends with an error. The JUnit file is replaced. The summary is
appended, because GitHub's $GITHUB_STEP_SUMMARY is one file for the whole step.
"""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Self
from xml.etree import ElementTree as ET

from ingot.artifact import GateOutcome
from ingot.cli.failure import Failure, failure_of
from ingot.cli.terminal.console import print_warning, visible
from ingot.errors import GateError, UsageError
from ingot.validation.gates import describe
from ingot.validation.report import formatting as fmt
from ingot.validation.report.report import render_markdown
from ingot.validation.report.tables import overlap_sentence
from ingot.validation.result import Evidence

_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # XML 1.0 has no form for these


class CIReports:
    """A context in which a command runs: what it reports here is written when the command ends, however it ends.

        with CIReports("ingot build demo", junit, summary) as reports:
            reports.measured(evidence)

    Raises UsageError at the start for a path that cannot be written.
    """

    def __init__(self, title: str, junit: Path | None, summary: Path | None) -> None:
        self._title = visible(title)
        self._junit, self._summary = junit, summary
        self._evidence: Evidence | None = None
        self._gates: Sequence[GateOutcome] = ()
        self._started, self._clock = datetime.now(UTC), monotonic()

    def __enter__(self) -> Self:
        for option, file in (("--junit", self._junit), ("--summary", self._summary)):
            if file is not None:
                _refuse_unwritable(option, file)
        return self

    def measured(self, evidence: Evidence) -> None:
        """Keep the evidence for both files."""
        self._evidence, self._gates = evidence, evidence.gates

    def decided(self, gates: Sequence[GateOutcome]) -> None:
        """Keep gates that were decided before, where nothing is measured."""
        self._gates = gates

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failure = None if error is None or isinstance(error, GateError) else _failure(error)
        try:
            self._write(failure)
        except UsageError as problem:
            if error is None:
                raise
            print_warning(str(problem))  # the error itself is more important

    def _write(self, failure: Failure | None) -> None:
        if self._junit is not None:
            with _writing("--junit", self._junit):
                self._junit.write_text(self._as_junit(failure), encoding="utf-8")
        if self._summary is not None:
            with _writing("--summary", self._summary):
                with self._summary.open("a", encoding="utf-8", errors="backslashreplace") as file:
                    file.write(self._as_markdown(failure))

    def _as_markdown(self, failure: Failure | None) -> str:
        evidence = f"{render_markdown(self._evidence).rstrip()}\n\n" if self._evidence else ""
        if failure is not None:
            indented = "".join(f"    {line}\n" for line in visible(failure.message).splitlines())
            return f"{evidence}## {self._title}: error\n\n{indented}\n"
        gates = "".join(f"- **{_verdict(gate)}** {describe(gate)}\n" for gate in self._gates)
        return evidence or f"## {self._title}: done\n\n{gates or 'Nothing was measured.'}\n\n"

    def _as_junit(self, failure: Failure | None) -> str:
        cases = [*self._cases()]
        if failure is not None or not cases:
            cases.insert(0, self._case_of_command(failure))
        suite = ET.Element("testsuite", name=_xml(self._title), timestamp=f"{self._started:%Y-%m-%dT%H:%M:%S}")
        suite.set("time", f"{monotonic() - self._clock:.3f}")
        suite.set("tests", str(len(cases)))
        for attribute, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
            suite.set(attribute, str(sum(case.find(tag) is not None for case in cases)))
        if self._evidence is not None:
            suite.append(_properties(self._evidence))
        suite.extend(cases)
        root = ET.Element("testsuites")
        root.append(suite)
        ET.indent(root)
        return f"<?xml version='1.0' encoding='utf-8'?>\n{ET.tostring(root, encoding='unicode')}\n"

    def _case_of_command(self, failure: Failure | None) -> ET.Element:
        """The command itself: the only test case where no gate was decided."""
        case = self._case(self._title.split()[1])
        if failure is not None:
            first = failure.message.partition("\n")[0]
            ET.SubElement(case, "error", type=failure.type, message=_xml(first)).text = _xml(failure.message)
        return case

    def _cases(self) -> Iterator[ET.Element]:
        """A test case per gate, and one per metric that got significantly worse without a gate."""
        for gate in self._gates:
            yield self._case_of_gate(gate)
        limited = {gate.name for gate in self._gates}
        for key, measured in self._evidence.measured.items() if self._evidence else ():
            if measured.change == "worse" and key not in limited:
                case = self._case(key)
                value = fmt.value(measured)
                text = f"significantly worse than the baseline: {value} ({fmt.interval(measured)}); no gate limits it"
                ET.SubElement(case, "skipped", message=text)
                yield case

    def _case_of_gate(self, gate: GateOutcome) -> ET.Element:
        case = self._case(gate.name)
        if gate.verdict == "PASS":
            ET.SubElement(case, "system-out").text = describe(gate)
        elif gate.advisory:
            ET.SubElement(case, "skipped", message=f"{_verdict(gate)}: {describe(gate)}")
        else:
            ET.SubElement(case, "failure", type=gate.verdict, message=describe(gate))
        return case

    def _case(self, name: str) -> ET.Element:
        return ET.Element("testcase", classname=_xml(self._title.replace(" ", ".")), name=_xml(name))


def _failure(error: BaseException) -> Failure:
    """Return the failure to write for any exception, also one that is Ingot's own mistake."""
    return failure_of(error) or Failure(type(error).__name__, str(error) or type(error).__name__, 1)


def _verdict(gate: GateOutcome) -> str:
    return f"{gate.verdict} (advisory)" if gate.advisory else gate.verdict


def _properties(evidence: Evidence) -> ET.Element:
    values = {
        "verdict": evidence.verdict or "NO GATES",
        "candidate": f"{evidence.candidate.name} {evidence.candidate.identity}",
        "baseline": f"{evidence.baseline.name} {evidence.baseline.identity}",
        "target": evidence.candidate.target,
        **({"load": str(evidence.load)} if evidence.load else {}),
        **({"overlap": overlap} if (overlap := overlap_sentence(evidence)) else {}),
    }
    properties = ET.Element("properties")
    for name, value in values.items():
        ET.SubElement(properties, "property", name=name, value=_xml(value))
    return properties


def _xml(text: str) -> str:
    """The text with characters that XML cannot hold as escapes."""
    return _NOT_XML.sub(lambda found: found[0].encode("unicode_escape", "surrogatepass").decode(), text)


@contextmanager
def _writing(option: str, file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(f"{option} {file}: the file cannot be written: {error.strerror}") from error


def _refuse_unwritable(option: str, file: Path) -> None:
    if file.is_dir():
        raise UsageError(f"{option} {file} is a folder; name a file")
    if not file.absolute().parent.is_dir():
        raise UsageError(f"{option} {file}: there is no folder {file.absolute().parent}; make it first")
    if not os.access(file if file.exists() else file.absolute().parent, os.W_OK):
        raise UsageError(f"{option} {file}: this file cannot be written; name another")
