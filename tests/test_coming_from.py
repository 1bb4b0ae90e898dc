"""The page for users of vLLM and llama.cpp names what exists, and the refusals of other programs' options do too."""

import json
import re
from collections.abc import Iterator
from typing import Any

import click
import pytest

from ingot import errors
from ingot.cli import other_names
from ingot.cli.command import COMMANDS
from ingot.cli.engine_options import engine_options
from ingot.cli.main import cli
from ingot.options import options_of
from ingot.passes.registry import pass_names
from ingot.pipeline.recipe.shipped import shipped_recipes
from ingot.runtime.options import EngineOptions
from ingot.runtime.speculation_options import SpeculationOptions
from tests.data_paths import ROOT

PAGE = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
API = json.loads((ROOT / "docs" / "openapi.json").read_text(encoding="utf-8"))
SERVER = ("Model and precision", "Memory and batches", "Speculation and adapters", "The server")
TERMINAL = {"ingot run": "run", "ingot build": "build", "ingot export": "export", "ingot validate": "validate"}


def rows(section: str) -> Iterator[list[str]]:
    """The cells of a section's table, without its head."""
    (text,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    for line in lines[1:]:
        yield [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def flags(command: str) -> set[str]:
    parameters = COMMANDS[command].get_params(click.Context(cli))
    return {name for each in parameters for name in (*each.opts, *each.secondary_opts)}


def recipe_keys(node: dict[str, Any], schema: dict[str, Any], before: str = "") -> Iterator[str]:
    """The keys of a recipe with their sections, such as engine.block_tokens."""
    if reference := node.get("$ref"):
        yield from recipe_keys(schema["$defs"][reference.rpartition("/")[2]], schema, before)
    for other in node.get("anyOf", ()):
        yield from recipe_keys(other, schema, before)
    for name, value in node.get("properties", {}).items():
        yield f"{before}{name}"
        yield from recipe_keys(value, schema, f"{before}{name}.")


def set_key(text: str) -> str | None:
    found = re.search(r"--set ([\w.]+)=", text)
    return found[1] if found else None


ENGINE_KEYS = {*options_of(EngineOptions), *options_of(SpeculationOptions)}


@pytest.mark.parametrize("section", SERVER)
def test_options_of_the_server_exist(section: str) -> None:
    own, named = flags("serve"), []
    for *_, ingot in rows(section):
        for text in code(ingot):
            if key := set_key(text):
                assert key in ENGINE_KEYS, text
            named += re.findall(r"(?<!\S)--[\w-]+", text) if not text.startswith("hf ") else []
    assert set(named) - {"--no-enable-prefix-caching"} <= own


@pytest.mark.parametrize("section", SERVER)
def test_options_of_other_servers_are_refused_with_what_replaces_them(section: str) -> None:
    known = {*other_names.OPTIONS["serve"], *flags("serve")}
    theirs = {text.partition(" ")[0] for *cells, _ in rows(section) for cell in cells for text in code(cell)}
    assert {name for name in theirs if name.startswith("-")} - known == set()


def test_recipe_keys_and_passes_exist() -> None:
    schema = json.loads((ROOT / "recipes" / "recipe.schema.json").read_text(encoding="utf-8"))
    keys = set(recipe_keys(schema, schema))
    named = re.findall(r"recipe's\s+key `([\w.]+)`", PAGE)
    assert named
    assert set(named) <= keys
    assert set(re.findall(r"recipe's pass `([\w-]+)`", PAGE)) <= set(pass_names())
    cells = [cell for *_, cell in rows("Model and precision")]
    recipes = {text for cell in cells for text in code(cell) if re.fullmatch(r"\w+-c\w+", text)}
    assert recipes
    assert recipes <= set(shipped_recipes())


def test_endpoints_exist() -> None:
    named = [text for *_, ingot in rows("Endpoints") for text in code(ingot) if text.startswith(("GET ", "POST "))]
    known = {f"{method.upper()} {path}" for path, methods in API["paths"].items() for method in methods}
    assert len(named) > 10
    assert set(named) <= known


def test_fields_of_requests_exist() -> None:
    schemas = API["components"]["schemas"]
    fields = {**schemas["CompletionRequest"]["properties"], **schemas["ChatRequest"]["properties"]}
    (shared,) = re.findall(r"^OpenAI's fields are the same\. (.*?)\n\n", PAGE, re.MULTILINE | re.DOTALL)
    named = {*code(shared), *(text for *_, ingot in rows("Requests") for text in code(ingot))}
    assert named <= set(fields)
    without = [cells for *cells, ingot in rows("Requests") if ingot.startswith("none")]
    refused = [text for cells in without for cell in cells for text in code(cell)]
    assert refused
    taken = [field for field in refused if field in fields and fields[field].get("enum") != [None, False, "", []]]
    assert taken == []


def test_metrics_and_variables_exist() -> None:
    metrics = (ROOT / "docs" / "serve.md").read_text(encoding="utf-8")
    named = [text for *_, ingot in rows("Metrics") for text in code(ingot)]
    assert named
    assert [name for name in named if f"`{name}`" not in metrics] == []
    settings = (ROOT / "src" / "ingot" / "settings.py").read_text(encoding="utf-8")
    variables = {text for *_, ingot in rows("Environment") for text in code(ingot) if text.startswith("INGOT_")}
    assert variables
    assert [name for name in variables if name not in settings] == []


def test_commands_at_the_terminal_exist() -> None:
    for theirs, ingot in rows("At the terminal"):
        for text in code(ingot):
            if text.startswith("ingot "):
                assert text.split()[1] in COMMANDS, text
            for name in re.findall(r"(?<!\S)--[\w-]+", text):
                command = text.split()[1] if text.startswith("ingot ") else "run"
                assert name in flags(command), (theirs, text)


@pytest.mark.parametrize("command", other_names.OPTIONS)
def test_what_replaces_an_option_exists(command: str) -> None:
    own = flags(command)
    for name, instead in other_names.OPTIONS[command].items():
        assert name not in own
        if "`ingot build" not in instead and (key := set_key(instead)) and command in ("serve", "run"):
            assert key in ENGINE_KEYS, instead
        elsewhere = "`" in instead
        assert elsewhere or set(re.findall(r"(?<!\S)--[\w-]+", instead)) <= own, instead


@pytest.mark.parametrize("name", other_names.COMMANDS)
def test_what_replaces_a_command_exists(name: str) -> None:
    assert name not in COMMANDS
    assert set(re.findall(r"`ingot (\w[\w-]*)", other_names.COMMANDS[name])) <= set(COMMANDS)


def test_another_programs_option_is_refused_by_name() -> None:
    with pytest.raises(errors.UsageError, match=r"`ingot serve` has no option --max-model-len; use `ingot build"):
        cli.main(["serve", "artifacts/x", "--max-model-len=4096"], standalone_mode=False)
    with pytest.raises(errors.UsageError, match=r"unknown command 'quantize'; use `ingot build`"):
        cli.main(["quantize", "x"], standalone_mode=False)
    with pytest.raises(click.NoSuchOption):
        cli.main(["serve", "artifacts/x", "--nothing-like-it"], standalone_mode=False)


def test_settings_of_the_page_are_read() -> None:
    """Each `--set KEY=VALUE` of the page has a value that is allowed."""
    drafts = set(options_of(SpeculationOptions))
    for setting in re.findall(r"--set ([a-z]\w*=[\w.-]+)`", PAGE):
        engine_options([setting], "lookup" if setting.partition("=")[0] in drafts else None)
