"""The README is kept true: its tree is the files', its Python runs, its commands exist."""

import re

import click

from ingot.cli.main import cli
from tests.data_paths import ROOT

README = ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8")


def test_every_command_that_the_readme_types_exists() -> None:
    commands = set(re.findall(r"\bingot (\w+)[ `]", TEXT)) - {"and", "is"}
    context = click.Context(cli)
    assert {"build", "run", "inspect", "validate"} <= commands
    assert commands <= set(cli.list_commands(context))


def test_the_python_of_the_readme_is_ten_lines_that_compile() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    compile(block, "README.md", "exec")
    assert len([line for line in block.splitlines() if line.strip()]) <= 10
