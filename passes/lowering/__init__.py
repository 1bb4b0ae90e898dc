"""Passes that turn the IR into the ops that an engine runs, and into segments of a program.

Lowerings to CUDA kernels and TensorRT are not passes; they are in `ingot.pipeline.targets`.
"""
