"""`ingot recipes`: the recipes that ship, and what one of them resolves to."""

import click

from ingot.cli.console import print_json, print_table
from ingot.pipeline.recipe_loader import list_recipes, load_recipe


@click.command("recipes")
@click.argument("name", required=False)
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Set one value, as `ingot build` does.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
def recipes_command(name: str | None, overrides: tuple[str, ...], as_json: bool) -> None:
    """List the recipes that ship, or show one (a name or a file), resolved, with every default filled in.

    \b
    Example:
      ingot recipes int4-cpu
    """
    if name:
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
