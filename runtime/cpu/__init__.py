"""The CPU executor: onnxruntime segments and Ingot's attention over one KV pool; `executor.py` is the entry.

The C sources, attention among them, are in `native`. Nothing here imports the compiler.
"""
