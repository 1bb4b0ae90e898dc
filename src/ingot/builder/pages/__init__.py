"""Pages of `ingot plan` and `ingot simulate`: one HTML file each, whose figures move with sliders, and the cockpit.

A figure in Python is here and in validation/report; one that a slider changes is in a .js file, which the page holds.
"""
