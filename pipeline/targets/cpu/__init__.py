"""Lowering of the IR to a CPU launch program: operations over one arena, and weights packed in tiles of 16 rows.

What Ingot's own CPU engine runs; programs for onnxruntime are made by targets/segments.
"""
