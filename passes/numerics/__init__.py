"""Algorithms on numpy arrays: rounding, GPTQ, scale search, pruning, Hadamard matrices, the knapsack.

They do not depend on the IR; the passes that apply them do.
"""
