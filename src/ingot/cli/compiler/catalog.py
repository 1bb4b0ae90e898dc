"""`ingot models`, `passes`, `recipes` and `schema`: list model types, passes and recipes, show one, print the schema.

The list of recipes needs only what the runtime needs; passes, and so a resolved recipe, need the compiler's packages.
"""

import inspect
import re
from dataclasses import MISSING
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import click
import yaml
from rich.text import Text

from ingot.cli.terminal.console import print_json, print_line, print_note, print_text
from ingot.cli.terminal.tables import print_table
from ingot.errors import in_columns
from ingot.options import Option, describe, options_of
from ingot.pipeline.recipe.shipped import list_recipes

if TYPE_CHECKING:
    from ingot.passes.base import Pass

_EXAMPLE_OPTIONS = 2


def models_command(model_type: str | None, as_json: bool) -> None:
    """List the model types, or say of one what keeps it from being imported."""
    from ingot.pipeline.checkpoint.config.text_tower import CHANGED
    from ingot.pipeline.checkpoint.families import FAMILIES, missing_feature, text_model_of

    if model_type is None:
        if as_json:
            print_json(sorted(FAMILIES))
            return
        print_line(f"Ingot imports {len(FAMILIES)} model types, and any model whose text_config is of one of them:")
        print_line(in_columns(FAMILIES))
        return
    text_model = model_type if model_type in FAMILIES else text_model_of(model_type)
    reason = None if text_model else CHANGED.get(model_type) or missing_feature(model_type)
    if as_json:
        facts = {"imported": text_model is not None, "text_model": text_model, "missing": reason}
        print_json({"model_type": model_type, **facts})
    elif model_type in FAMILIES:
        print_line(f"{model_type} is imported.")
    elif text_model:
        print_line(f"Of {model_type} the text model, {text_model}, is imported.")
    elif reason is not None:
        print_line(f"{model_type} is not imported: it has {reason}.")
    else:
        print_line(
            f"{model_type} is in no table of Ingot: it is imported if its text_config is of a model type that "
            "`ingot models` lists."
        )


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
    options = {name: _option_facts(option) for name, option in options_of(pass_class).items()}
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


def _option_facts(option: Option) -> dict[str, object]:
    default = {} if option.default is MISSING else {"default": option.plain_default}
    return {"allowed": _allowed(option.annotation), **default, "meaning": option.doc.text}


def _allowed(annotation: Any) -> str:
    """The values of an option in words: "a whole number from 0 to 10", "one of 2, 3, 4, 8"."""
    if get_origin(annotation) is Literal:
        return f"one of {', '.join(map(str, get_args(annotation)))}"
    return describe(annotation)


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
