"""Documents link to headings that exist, and name files that exist; the log keeps the names of its time."""

import re
import subprocess
from pathlib import Path

from ingot.cli.main import cli
from tests.data_paths import ROOT

_FOLDERS = "runtime|pipeline|passes|kernels|planning|validation|src/ingot|tests|benchmarks|deploy|examples|docs|recipes"
_FILES = rf"(?:{_FOLDERS}|\.ci)"
_PLACEHOLDER = re.compile(r"/x/|/[A-Z]{4,}\b")
_COMMAND = re.compile(r"`ingot ([a-z][a-z-]*)\b(?!=)|^ingot ([a-z][a-z-]*)\b", re.MULTILINE)
_NAMED = re.compile(rf"(?<![\w/.-]){_FILES}(?:/[\w.-]+)+\.(?:py|c|h|md|json|yaml|toml|txt)\b")


def documents() -> list[Path]:
    command = ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard", "*.md"]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [ROOT / name for name in names if not name.startswith("tests/") and (ROOT / name).exists()]


def anchors(document: Path) -> set[str]:
    """The anchors of all headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", document.read_text("utf-8"), flags=re.DOTALL)
    headings = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", each) for each in re.findall(r"^#+ (.*)$", text, re.MULTILINE))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_to_files_and_headings() -> None:
    broken = []
    for document in documents():
        text = re.sub(r"```.*?```", "", document.read_text("utf-8"), flags=re.DOTALL)
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            name, _, anchor = link.partition("#")
            target = document.parent / name if name else document
            is_heading = not anchor or target.suffix != ".md"
            if not name.startswith("http") and not (target.exists() and (is_heading or anchor in anchors(target))):
                broken.append(f"{document.relative_to(ROOT)}: {link}")
    assert broken == []


def test_files_that_documents_name_exist() -> None:
    missing = [
        f"{document.relative_to(ROOT)}: {name}"
        for document in documents()
        if document.name != "log.md"
        for name in _NAMED.findall(document.read_text("utf-8"))
        if not (_PLACEHOLDER.search(name) or (ROOT / name).exists() or (ROOT / "tests" / name).exists())
    ]
    assert missing == []


def test_commands_that_documents_name_exist() -> None:
    known = {*cli.commands, "help"}
    for document in documents():
        if document.name not in ("log.md", "CHANGELOG.md"):
            named = {name for found in _COMMAND.findall(document.read_text("utf-8")) for name in found if name}
            assert named <= known, document


def test_a_term_of_the_glossary_has_one_entry() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text("utf-8")
    entries = [
        term for line in text.splitlines() if line.startswith("**") for term in re.findall(r"\*\*([^*]+)\*\*", line)
    ]
    assert len(entries) == len(set(entries))
    assert {"verify", "validate", "evidence", "gate", "artifact", "goodput"} <= set(entries)
    assert [term for term in re.findall(r"(?<!\*)\*([a-zA-Z ]+)\*(?!\*)", text) if not _is_entry(term, text)] == []


def _is_entry(term: str, text: str) -> bool:
    """Return whether the glossary has the term, in the singular or the plural."""
    singular = {term, term.removesuffix("s"), term.removesuffix("es")}
    return any(f"**{each}**" in text for each in singular)
