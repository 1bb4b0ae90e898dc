"""`ingot passes`: the list, one pass with its options, and both as JSON."""

import json

import pytest

from ingot.cli.main import run
from ingot.passes.registry import pass_names

Captured = pytest.CaptureFixture[str]


def test_all_passes_are_listed_with_kind_and_summary(capsys: Captured) -> None:
    assert run(["passes"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in pass_names())
    assert "\x1b" not in shown


@pytest.mark.parametrize("name", pass_names())
def test_a_pass_is_shown_with_what_it_does_and_its_options(name: str, capsys: Captured) -> None:
    assert run(["passes", name]) == 0
    shown = capsys.readouterr().out
    assert run(["passes", name, "--json"]) == 0
    (facts,) = json.loads(capsys.readouterr().out)
    assert facts["name"] == name
    assert shown.startswith(f"{name} ({facts['kind']})\n")
    assert all(option in shown for option in facts["options"])


def test_the_json_has_every_option_with_type_and_default(capsys: Captured) -> None:
    assert run(["passes", "--json"]) == 0
    facts = {one["name"]: one for one in json.loads(capsys.readouterr().out)}
    assert list(facts) == pass_names()
    assert facts["fold-constants"]["options"] == {"max_bytes": {"type": "int", "default": 1 << 20}}
    assert facts["quantize-weights"]["options"]["bits"] == {"type": "Literal[2, 3, 4, 8]", "default": 4}
