"""Recipes: what to build and what must hold, from YAML to a checked Recipe."""
