"""A page of tables and figures in the report's style: one file. Its scripts, if any, are in it and reach nothing else.

A browser runs those scripts alone, by their digests in the page's policy, and lets them send nothing.
"""

import hashlib
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ingot.validation.report.figures import Figure
from ingot.validation.report.report import page_template


@dataclass(frozen=True)
class PageTable:
    """A table: the first column names the rows, the first `left` columns are words.

    links   an address for the name of each row, or ""; none at all where no row has one
    """

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int = 1
    links: Sequence[str] = ()


@dataclass(frozen=True)
class PageControl:
    """A slider over `values`, or a list to choose from where they have words.

    name      the value's name for the page's script
    start     place of the value at first
    choices   words of each value; () for a slider
    unit      after a slider's value
    """

    name: str
    label: str
    values: Sequence[float]
    start: int = 0
    choices: Sequence[str] = ()
    unit: str = ""


@dataclass(frozen=True)
class PagePanel:
    """A place that the page's script fills with a figure.

    chart   what drawing.js draws there by itself: bars with names, or a curve
    """

    name: str
    title: str
    caption: str
    wide: bool = False
    chart: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PageSection:
    """A section with a heading: sentences, then controls with what they change, facts, figures and tables."""

    anchor: str
    heading: str
    note: str = ""
    sentences: Sequence[str] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    figures: Sequence[Figure] = ()
    tables: Sequence[PageTable] = ()
    controls: Sequence[PageControl] = ()
    panels: Sequence[PagePanel] = ()


@dataclass(frozen=True)
class Page:
    """A page.

    kind        what it is, above the title
    verdict     PASS, FAIL, UNDECIDED or "" next to the title
    facts       the most important figures, at the top
    sources     where the numbers are from, at the end
    scripts     that draw the panels, in order
    data        that they read
    connects    let them send requests to the server that the page is from
    """

    kind: str
    title: str
    sections: Sequence[PageSection]
    sentences: Sequence[str] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    sources: str = ""
    verdict: str = ""
    scripts: Sequence[str] = ()
    data: Mapping[str, Any] = field(default_factory=dict)
    connects: bool = False

    @property
    def policy(self) -> str:
        """The content security policy: no file, no request, and of all scripts these alone."""
        digests = [b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in self.scripts]
        scripts = " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"
        connects = "'self'" if self.connects else "'none'"
        return (
            f"default-src 'none'; style-src 'unsafe-inline'; script-src {scripts}; connect-src {connects};"
            " base-uri 'none'; form-action 'none'"
        )


def render_page(page: Page) -> str:
    """The page as HTML. The same page gives the same bytes."""
    return page_template("page.html.jinja").render(page=page)


def write_page(file: Path, page: Page) -> None:
    """Write a page as HTML, into a new folder if need be."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(render_page(page), encoding="utf-8")
