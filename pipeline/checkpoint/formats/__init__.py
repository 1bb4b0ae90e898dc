"""Quantized formats of checkpoints: their layouts, decoded and encoded bit for bit, and their settings in config.json.

Whole checkpoints are written by pipeline/interchange; GGUF's files are read by ../gguf_file.py and ../gguf.py.
"""
