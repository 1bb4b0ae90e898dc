"""`ingot passes`, `ingot recipes` and `ingot schema`: list passes and shipped recipes, show one, print the schema.

The list of recipes needs only what the runtime needs; passes, and so a resolved recipe, need the compiler's packages.
"""

import inspect
import re
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import click
import yaml
from rich.text import Text

from ingot.cli.console import print_json, print_line, print_note, print_text
from ingot.cli.tables import print_table
from ingot.pipeline.recipe.shipped import list_recipes

if TYPE_CHECKING:
    from ingot.passes.base import Pass

_EXAMPLE_OPTIONS = 2


def passes_command(name: str | None, as_json: bool) -> None:
    """List the passes, or show one pass with its options."""
    from ingot.passes.registry import load_pass_class, pass_names

    classes = [load_pass_class(name)] if name else [load_pass_class(known) for known in pass_names()]
    if as_json:
        print_json([_facts(pass_class) for pass_class in classes])
    elif name:
        _show(classes[0])
    else:
        print_table("", ("pass", "kind", "what it does"), [(c.name, c.kind, c.summary) for c in classes], left=3)


def _facts(pass_class: "type[Pass]") -> dict[str, Any]:
    """A pass for programs: of each option what is allowed, the default (absent if it has none) and what it means."""
    from ingot.passes.base import option_docs, option_types

    docs = option_docs(pass_class)
    options = {
        name: {"allowed": _allowed(annotation), **_default(pass_class, name), "meaning": docs.get(name, "")}
        for name, annotation in option_types(pass_class).items()
    }
    return {"name": pass_class.name, "kind": pass_class.kind, "summary": pass_class.summary, "options": options}


def _show(pass_class: "type[Pass]") -> None:
    facts = _facts(pass_class)
    print_line(Text(f"{pass_class.name} ({pass_class.kind})", style="bold"))
    for text in filter(None, (pass_class.summary, _remark(pass_class))):
        print_text(text)
    options: dict[str, dict[str, Any]] = facts["options"]
    if options:
        print_line("")
        rows = [
            (name, _as_yaml(one["default"]) if "default" in one else "required", one["allowed"], one["meaning"])
            for name, one in options.items()
        ]
        print_table("", ("option", "default", "allowed", "meaning"), rows, left=4)
    print_line("\nIn a recipe:")
    print_line(f"  passes:\n    - {_example(pass_class.name, options)}")


def _example(name: str, options: dict[str, dict[str, Any]]) -> str:
    """The pass as an item of a recipe's list, with one or two options that have a value of their own."""
    shown = {key: one["default"] for key, one in options.items() if one.get("default") not in (None, [], {}, "")}
    return f"{name}: {_as_yaml(dict(list(shown.items())[:_EXAMPLE_OPTIONS]))}" if shown else name


def _remark(pass_class: "type[Pass]") -> str:
    """Return the docstring's sentence on the options as a whole, as in "Options. Give at most one budget"."""
    first = " ".join((inspect.getdoc(pass_class) or "").partition("\n\n")[0].split())
    found = re.fullmatch(r"(?:No options|Options)[.:] ?(.*?)[.:]?", first)
    return f"{found[1][0].upper()}{found[1][1:]}." if found and found[1] else ""


def _allowed(annotation: Any) -> str:
    """The values of an option in words: "a whole number from 0 to 10", "one of 2, 3, 4, 8"."""
    from ingot.passes.base import describe

    if get_origin(annotation) is Literal:
        return f"one of {', '.join(map(str, get_args(annotation)))}"
    return describe(annotation)


def _default(pass_class: "type[Pass]", name: str) -> dict[str, object]:
    from ingot.passes.base import plain_value

    field = next(field for field in fields(pass_class) if field.name == name)
    if field.default_factory is not MISSING:
        return {"default": plain_value(field.default_factory())}
    return {} if field.default is MISSING else {"default": plain_value(field.default)}


def _as_yaml(value: object) -> str:
    text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=float("inf"))
    return text.removesuffix("...\n").strip()


def schema_command(output: Path | None) -> None:
    """Print the JSON Schema of recipes, with the options of every installed pass."""
    from ingot.pipeline.recipe.json_schema import schema_text

    if output is None:
        click.echo(schema_text(), nl=False)
    else:
        output.write_text(schema_text(), encoding="utf-8")
        print_note(f"wrote {output}; name it in a recipe's first line: # yaml-language-server: $schema={output}")


def recipes_command(name: str | None, overrides: tuple[str, ...], as_json: bool) -> None:
    """List the shipped recipes, or show one (a name or a file) resolved, with every default filled in."""
    if name:
        from ingot.pipeline.recipe.load import load_recipe

        recipe = load_recipe(name, overrides)
        if as_json:
            print_json(recipe.model_dump(mode="json"))
        else:
            click.echo(recipe.resolved_yaml(with_serving=True), nl=False)
        return
    recipes = list_recipes()
    if as_json:
        print_json([{"name": name, "description": description} for name, description in recipes])
    else:
        print_table("", ("recipe", "what it builds"), recipes, left=2)
