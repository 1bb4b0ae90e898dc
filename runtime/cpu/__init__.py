"""The CPU executor: onnxruntime segments and Ingot's attention over one KV pool; `executor.py` is the entry.

The attention kernel in C is in `native`. Nothing here imports the compiler.
"""
