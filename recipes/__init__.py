"""The recipes that ship: YAML, no code. `ingot recipes` lists them; docs/recipes.md explains every key."""
