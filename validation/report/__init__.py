"""Renders evidence as HTML and Markdown, and formats its numbers.

Measurements and statistics are in the folder above.
"""
