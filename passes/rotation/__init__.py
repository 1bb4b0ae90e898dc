"""The pass `rotate`: orthogonal rotations of channels that keep the model's outputs.

Hadamard matrices and rotations of arrays are in `ingot.passes.numerics.hadamard`.
"""
