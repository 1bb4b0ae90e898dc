"""Targets: one row of facts each, and the writers that turn a lowered IR into a program."""
