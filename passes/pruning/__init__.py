"""Passes that prune: `prune-structure` removes neurons, heads and layers, `prune-weights` sets weights to zero.

The algorithms on one layer's weights are in `ingot.passes.numerics.pruning`.
"""
