"""Planted faults, at least one for each class of cache error that others had: `ingot verify` must find every one.

faults.py plants them by patching one function of the runtime for the life of a context; score.py prints the score.
"""
