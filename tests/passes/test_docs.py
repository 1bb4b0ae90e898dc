"""docs/passes.md agrees with the code: every pass has a section with its summary, its options and their defaults."""

import re
from dataclasses import MISSING, fields

import yaml

from ingot.passes.base import Pass
from ingot.passes.registry import PASSES, load_pass_class, make_pass
from tests.data_paths import ROOT
from tests.each_case import each_case

TEXT = (ROOT / "docs" / "passes.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^### (\S+)\n(.*?)(?=^##|\Z)", TEXT, re.MULTILINE | re.DOTALL))


def test_every_registered_pass_has_a_section_and_no_other() -> None:
    assert set(SECTIONS) == set(PASSES)


@each_case("name", PASSES)
def test_a_section_begins_with_kind_and_summary(name: str) -> None:
    pass_class = load_pass_class(name)
    assert SECTIONS[name].strip().startswith(f"*{pass_class.kind}.* {pass_class.summary}")


@each_case("name", PASSES)
def test_a_section_lists_the_options_with_their_defaults(name: str) -> None:
    pass_class = load_pass_class(name)
    documented = re.findall(r"^\| `(\w+)` \| `(.*?)` \|", SECTIONS[name], re.MULTILINE)
    assert documented == [(field.name, _default_text(name, field.name)) for field in fields(pass_class)]


@each_case("name", PASSES)
def test_the_example_of_a_section_is_a_valid_pass(name: str) -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", SECTIONS[name], re.DOTALL)
    for entry in yaml.safe_load(example):
        made = make_pass(entry, {}) if isinstance(entry, str) else make_pass(*next(iter(entry.items())))
        assert isinstance(made, Pass)
        assert made.name == name


def _default_text(name: str, option: str) -> str:
    """The default as YAML writes it in a flow: true, 32, {}."""
    field = next(field for field in fields(load_pass_class(name)) if field.name == option)
    assert field.default is not MISSING or field.default_factory is not MISSING, "options have defaults"
    value = make_pass(name).options()[option]
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
