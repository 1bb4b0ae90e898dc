"""Recipes: from YAML files and --set to a checked, frozen Recipe.

What a recipe's passes and targets do is in passes/ and pipeline/targets; the compile is in pipeline/compile.py.
"""
