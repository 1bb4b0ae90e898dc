"""`ingot recipes`: the list, one recipe resolved, and both as JSON.

`ingot passes`: the list, one pass with its options, and both as JSON.
"""

import json
import re
from pathlib import Path

import pytest
import yaml

from ingot.cli.compiler.catalog import models_command
from ingot.cli.main import run
from ingot.passes.registry import make_pass, pass_names
from ingot.pipeline.checkpoint.families import FAMILIES, text_model_of
from ingot.pipeline.recipe.json_schema import recipe_json_schema
from ingot.pipeline.recipe.shipped import list_recipes
from tests.data_paths import ROOT
from tests.each_case import each_case

Captured = pytest.CaptureFixture[str]


def test_all_passes_are_listed_with_kind_and_summary(capsys: Captured) -> None:
    assert run(["passes"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in pass_names())
    assert "\x1b" not in shown


@each_case("name", pass_names())
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
    (option,) = facts["fold-constants"]["options"].values()
    assert option["default"] == 1 << 20
    assert option["allowed"].startswith("a whole number from 0 to ")
    assert option["meaning"] == "largest result to keep as a constant, in bytes"
    assert facts["quantize-weights"]["options"]["bits"]["allowed"] == "one of 2, 3, 4, 8"


PYTHON = re.compile(r"\b(Literal|Mapping|Annotated|tuple|None|True|False|Options|str|int|float|object)\b")


@each_case("name", pass_names())
def test_a_pass_is_shown_without_python(name: str, capsys: Captured) -> None:
    assert run(["passes", name]) == 0
    shown = capsys.readouterr().out
    assert PYTHON.search(shown) is None
    example = yaml.safe_load(shown.partition("In a recipe:\n")[2])
    ((entry,),) = example.values()
    assert make_pass(*next(iter(entry.items()))) if isinstance(entry, dict) else make_pass(entry)


def test_options_are_shown_with_default_allowed_values_and_meaning(capsys: Captured) -> None:
    assert run(["passes", "gptq"]) == 0
    shown = capsys.readouterr().out
    rows = {line.split()[0]: " ".join(line.split()) for line in shown.splitlines() if line}
    assert rows["act_order"].startswith("act_order true true or false round columns with the largest inputs first")
    assert rows["bits"].startswith("bits 4 one of 2, 3, 4, 8")
    assert rows["overrides"].startswith("overrides {} a mapping from names")
    assert "    - gptq: {bits: 4, block_size: 32}\n" in shown
    assert "in addition to" not in shown
    assert run(["passes", "mixed-precision"]) == 0
    assert "\nGive at most one budget; the default is" in capsys.readouterr().out


def test_the_schema_of_recipes_is_printed_or_written(tmp_path: Path, capsys: Captured) -> None:
    assert run(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == recipe_json_schema()
    assert run(["schema", "-o", str(tmp_path / "schema.json")]) == 0
    assert json.loads((tmp_path / "schema.json").read_text(encoding="utf-8")) == recipe_json_schema()
    assert "yaml-language-server: $schema=" in capsys.readouterr().err
    assert run(["schema", "-o", str(tmp_path / "no/schema.json")]) == 1
    assert "No such file" in capsys.readouterr().err


NAMES = [name for name, _ in list_recipes()]


def test_all_recipes_are_listed_with_their_description(capsys: Captured) -> None:
    assert run(["recipes"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown and description in shown for name, description in list_recipes())
    assert run(["recipes", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in listed] == NAMES


@each_case("name", NAMES)
def test_a_recipe_is_shown_resolved(name: str, capsys: Captured) -> None:
    assert run(["recipes", name]) == 0
    resolved = yaml.safe_load(capsys.readouterr().out)
    assert run(["recipes", name, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert resolved["name"] == facts["name"] == name
    assert resolved["engine"] == facts["engine"]


def test_a_resolved_recipe_resolves_to_itself(tmp_path: Path, capsys: Captured) -> None:
    assert run(["recipes", "int4-cpu", "--set", "passes.quantize-weights.bits=8", "--set", "seed=3"]) == 0
    (tmp_path / "mine.yaml").write_text(text := capsys.readouterr().out)
    assert run(["recipes", str(tmp_path / "mine.yaml")]) == 0
    assert capsys.readouterr().out == text


def test_a_change_is_checked_as_in_a_build(capsys: Captured) -> None:
    assert run(["recipes", "int4-cpu", "--set", "passes.quantize-weights.block_size=7"]) == 2
    shown = capsys.readouterr().err
    assert "--set:passes.quantize-weights.block_size" in shown
    assert "block_size is 7; allowed: 0 or 16 or 32 or 64 or 128 or 256 or 'channel'" in shown


def test_model_types_are_listed_and_said_what_they_lack(capsys: Captured) -> None:
    assert run(["models"]) == 0
    shown = capsys.readouterr().out
    assert f"Ingot imports {len(FAMILIES)} model types" in shown
    assert set(FAMILIES) <= set(shown.split())
    assert run(["models", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == sorted(FAMILIES)


@each_case(
    ("model_type", "said"),
    [
        ("llama", "llama is imported."),
        ("falcon_mamba", "falcon_mamba is not imported: it has Mamba-1 layers."),
        ("paligemma", "paligemma is not imported: it has attention both ways within its prompt."),
        ("lfm2_vl", "Of lfm2_vl the text model, lfm2, is imported."),
        ("of_tomorrow", "of_tomorrow is in no table of Ingot: it is imported if its text_config is of a model type"),
    ],
)
def test_a_model_type_is_said_to_be_imported_or_what_it_lacks(model_type: str, said: str, capsys: Captured) -> None:
    assert run(["models", model_type]) == 0
    assert said in " ".join(capsys.readouterr().out.split())
    assert run(["models", model_type, "--json"]) == 0
    is_imported = model_type in FAMILIES or text_model_of(model_type) is not None
    assert json.loads(capsys.readouterr().out)["imported"] == is_imported


def test_the_page_of_model_types_says_what_the_command_says(capsys: Captured) -> None:
    lines = (ROOT / "docs" / "model-types.md").read_text().splitlines()
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")]
    assert set(FAMILIES) <= {model_type for model_type, _, _ in rows}
    for model_type, read, lacks in rows:
        models_command(model_type, as_json=True)
        facts = json.loads(capsys.readouterr().out)
        assert (facts["imported"], facts["missing"]) == (read != "no", lacks or None)
        assert facts["text_model"] == {"yes": model_type, "no": None}.get(read, read.partition("`")[2])
