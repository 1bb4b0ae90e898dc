"""The KV cache without its memory: block tables, the prefix index, and the tiers that blocks move between.

Memory is in the executors' pools; what a step computes is in `ingot.runtime.steps`.
"""
