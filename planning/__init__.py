"""Predicts what a model needs and how fast it runs: memory, time of a step, latency, money.

Nothing here computes a model; facts about checkpoints and programs come from the callers, in ingot.builder and
ingot.cli.
"""
