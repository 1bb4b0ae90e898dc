"""Kernels of the CUDA targets, in Triton: compiled ahead of time to cubins, so that no run needs Triton or a compiler.

One file per kernel. Every kernel reads and writes plain pointers with strides in elements, takes shapes as arguments,
and what changes its code (head size, block size, precision) as constants. What it computes is told in its docstring
and checked against numpy in tests/kernels, in Triton's interpreter on a CPU.

Sums are float32. Their order depends on constants and on a row's own length alone, never on the rows beside it.
"""
