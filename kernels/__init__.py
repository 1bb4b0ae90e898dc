"""Kernels of the CUDA targets, in Triton: compiled ahead of time to cubins, so that no run needs Triton or a compiler.

One file per kernel. Every kernel reads and writes plain pointers with strides in elements, takes shapes as arguments,
and parameters that change its code (head size, block size, precision) as constants. Its docstring says what it does;
tests/kernels checks that against numpy, in Triton's interpreter on a CPU.

Sums are float32. Their order depends on constants and on a row's own length alone, never on other rows of the batch.
"""
