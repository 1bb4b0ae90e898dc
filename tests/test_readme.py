"""The README is true: its Python runs, its commands and folders exist, its links lead to files."""

import re
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest

import ingot
from ingot.builder import BuildResult, build
from ingot.cli.main import cli
from tests.data_paths import DEMO_MODEL, ROOT

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
QUICK = ("evaluation.tokens=2048", "evaluation.layer_kl_tokens=0", "latency=null", "gates={}", "generate=null")


def test_every_command_in_the_readme_exists() -> None:
    commands = set(re.findall(r"\bingot (\w[\w-]*)[ `]", TEXT)) - {"compiles"}
    known = set(cli.list_commands(click.Context(cli)))
    assert {"build", "run"} <= commands <= known
    (row,) = re.findall(r"^\| Commands \| (.*) \|$", TEXT, re.MULTILINE)
    assert set(re.findall(r"`([\w-]+)`", row)) == known


@pytest.mark.usefixtures("memory_of_this_process")
def test_the_ten_lines_of_python_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def quick_build(recipe: str, output: str) -> BuildResult:
        return build(recipe, (f"checkpoint={DEMO_MODEL}", *QUICK), output)

    (block,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert len([line for line in block.splitlines() if line.strip()]) <= 10
    monkeypatch.setattr(ingot, "build", quick_build, raising=False)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(block, "README.md", "exec"), names)
    assert names["done"].finish_reason == "length"
    assert names["output"].finished
    assert capsys.readouterr().out.startswith(str(names["built"].evidence.measured["perplexity_ratio"].estimate))


def test_links_lead_to_files() -> None:
    targets = dict(re.findall(r"^\[([\w-]+)\]: (\S+)$", TEXT, re.MULTILINE))
    assert {name for _, name in re.findall(r"\[([^\]]+)\]\[([\w-]+)\]", TEXT)} == set(targets)
    assert [path for path in targets.values() if not (ROOT / path).exists()] == []


def test_links_on_the_index_lead_to_the_repository() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    (rule,) = project["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]
    source = project["project"]["urls"]["Source"]
    assert f"git clone {source} && cd ingot\n" in TEXT
    shown = re.sub(rule["pattern"], rule["replacement"], TEXT)
    links = re.findall(r"^\[[\w-]+\]: (\S+)$", shown, re.MULTILINE)
    assert links
    assert all(link.startswith(f"{source}/blob/main/") for link in links)


def test_the_tree_names_folders_that_exist() -> None:
    (tree,) = re.findall(r"## Where things are\n\n```text\n(.*?)```", TEXT, re.DOTALL)
    parent = ""
    for line in tree.splitlines():
        name = line.split()[0].rstrip("/")
        parent = parent if line.startswith(" ") else name
        folder = ROOT / parent / name if line.startswith(" ") else ROOT / name
        assert folder.is_dir(), line
