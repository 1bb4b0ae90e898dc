"""Passes that quantize weights, activations or the KV cache, and passes that prepare, choose or tune a quantization.

The algorithms themselves, in numpy, are in passes/numerics; the other modules here put their results into the IR.
"""
