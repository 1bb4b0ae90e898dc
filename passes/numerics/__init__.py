"""Algorithms on numpy arrays: rounding, GPTQ, scale search, pruning, Hadamard matrices, the knapsack.

They do not depend on the IR, unlike the passes that apply them.
"""
