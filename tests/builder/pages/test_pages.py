"""The pages of a plan and of a simulation: whole HTML, figures in words, nothing that a browser or axe finds."""

from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING

from ingot.builder.pages.plan_page import plan_page
from ingot.builder.pages.recording import Recording
from ingot.builder.pages.simulation_page import simulation_page
from ingot.planning.hardware import find_hardware
from ingot.planning.load import Load
from ingot.planning.plan import make_plan
from ingot.planning.service_levels import LevelBounds
from ingot.planning.simulation.deployment import Deployment, sweep
from ingot.planning.simulation.traffic import RequestSizes, parse_traffic
from ingot.validation.report.page import render_page, write_page
from tests.builder.pages.browser import SIZES, problems
from tests.each_case import each_case
from tests.planning.shapes import mixture_shape, subject
from tests.planning.simulation.engines import LinearTimes, shape_of

if TYPE_CHECKING:
    from playwright.sync_api import Browser

_VOID = {"meta", "br", "wbr", "rect", "line", "circle", "path", "input"}


class _Elements(HTMLParser):
    """Open elements are closed in order; attributes by element."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in _VOID:
            assert self.open.pop() == tag

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.found)


def plan_html() -> str:
    load = Load(32, 1024, 256)
    plan = make_plan(subject(mixture_shape()), "h100", find_hardware("h100"), load, devices=8, price=3.0)
    bound = 1.2 * max(one.upper["tpot"] for one in plan.sweep)
    plan = replace(plan, level=("a test", LevelBounds(words="a test", tpot=bound)))
    return render_page(plan_page(plan, {"model": "a <test> & more"}))


def simulation_html() -> str:
    level = LevelBounds(words="a test", ttft=0.5, tpot=0.05)
    deployment = Deployment(shape=shape_of(), times=LinearTimes())
    sizes = RequestSizes(prompt_tokens=64, output_tokens=8)
    traffic = parse_traffic("poisson:20", sizes=sizes, count=30, context_tokens=8192)
    around, recording = sweep(deployment, traffic, level, [10, 20, 40]), Recording()
    found = replace(deployment, watch=recording.watch).run(traffic, level, recording.end)
    return render_page(simulation_page("a test", traffic.name, level, found, around, "a <line> of tests", recording))


PAGES = {"plan": plan_html, "simulation": simulation_html}


@each_case("name", sorted(PAGES))
def test_a_page_is_whole_and_needs_no_other_file(name: str) -> None:
    text = PAGES[name]()
    page = _Elements(text)
    assert not {tag for tag, _ in page.found} & {"link", "img", "iframe"}
    assert not any("src" in attributes or "style" in attributes for _, attributes in page.found)
    assert "<test>" not in text
    assert "<line>" not in text
    assert page.count("table") == page.count("caption") > 0
    assert all(attributes.get("scope") in ("col", "row") for tag, attributes in page.found if tag == "th")
    assert all(attributes.get("for") for tag, attributes in page.found if tag in ("label", "output"))
    assert text == PAGES[name]()


def test_the_page_of_a_plan_has_its_figures_its_verdict_and_the_other_ways_to_share_a_mixture() -> None:
    text = plan_html()
    for words in ("tokens/s", "all-to-alls", "experts over 8", "PASS", "$"):
        assert words in text


@each_case("name", sorted(PAGES))
def test_a_browser_shows_it_without_errors_at_each_width(browser: "Browser", name: str, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(PAGES[name]())
    for width, scheme in SIZES:
        assert problems(browser, file.as_uri(), width, scheme) == []


def test_a_plan_that_fits_nowhere_has_a_page_without_sliders() -> None:
    plan = make_plan(subject(mixture_shape(2000, 4000)), "rtx-4090", find_hardware("rtx-4090"), Load(1, 1024, 256))
    assert plan.latency is None
    page = _Elements(render_page(plan_page(plan, {"model": "a test"})))
    assert not {tag for tag, _ in page.found} & {"script", "input"}
    assert page.count("table") > 0


def test_a_browser_runs_no_script_that_the_page_does_not_know(browser: "Browser", tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(plan_html().replace("</body>", "<script>document.title = 'changed'</script></body>"))
    page = browser.new_page()
    page.goto(file.as_uri())
    assert page.title() != "changed"
    assert page.locator("#latency dl").count() == 1
    page.close()


def test_a_page_is_written_into_a_new_folder(tmp_path: Path) -> None:
    level = LevelBounds(words="a test", ttft=0.5)
    deployment = Deployment(shape=shape_of(), times=LinearTimes())
    traffic = parse_traffic("poisson:20", sizes=RequestSizes(output_tokens=4), count=5, context_tokens=8192)
    page = simulation_page("a test", traffic.name, level, deployment.run(traffic, level), (), "a test", Recording())
    write_page(tmp_path / "new" / "page.html", page)
    assert "Other rates" not in (tmp_path / "new" / "page.html").read_text()
