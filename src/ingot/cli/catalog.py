"""`ingot passes` and `ingot recipes`: list the passes and the shipped recipes, or show one.

The list of recipes needs only what the runtime needs; passes, and so a resolved recipe, need the compiler's packages.
"""

import inspect
from dataclasses import MISSING, Field, fields
from typing import TYPE_CHECKING, Any, get_type_hints

import click

from ingot.cli.console import print_json, stdout
from ingot.cli.tables import print_table
from ingot.pipeline.recipe.shipped import list_recipes

if TYPE_CHECKING:
    from ingot.passes.base import Pass


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
    options = {
        field.name: {"type": _type_name(pass_class, field), "default": _default(field)} for field in fields(pass_class)
    }
    return {"name": pass_class.name, "kind": pass_class.kind, "summary": pass_class.summary, "options": options}


def _show(pass_class: "type[Pass]") -> None:
    console = stdout()
    console.print(f"{pass_class.name} ({pass_class.kind})", style="bold")
    console.print(inspect.getdoc(pass_class) or pass_class.summary, markup=False)
    rows = [(field.name, _type_name(pass_class, field), str(_default(field))) for field in fields(pass_class)]
    if rows:
        console.print()
        print_table("", ("option", "type", "default"), rows, left=3)


def _type_name(pass_class: "type[Pass]", field: Field[Any]) -> str:
    hint = get_type_hints(pass_class)[field.name]
    text = hint.__name__ if isinstance(hint, type) and not hasattr(hint, "__args__") else str(hint)
    return text.replace("typing.", "").replace("collections.abc.", "")


def _default(field: Field[Any]) -> object:
    from ingot.passes.base import plain_value

    if field.default_factory is not MISSING:
        return plain_value(field.default_factory())
    return "required" if field.default is MISSING else plain_value(field.default)


def recipes_command(name: str | None, overrides: tuple[str, ...], as_json: bool) -> None:
    """List the shipped recipes, or show one (a name or a file) resolved, with every default filled in."""
    if name:
        from ingot.pipeline.recipe.load import load_recipe

        recipe = load_recipe(name, overrides)
        if as_json:
            print_json(recipe.model_dump(mode="json"))
        else:
            click.echo(recipe.resolved_yaml(), nl=False)
        return
    recipes = list_recipes()
    if as_json:
        print_json([{"name": name, "description": description} for name, description in recipes])
    else:
        print_table("", ("recipe", "what it builds"), recipes, left=2)
