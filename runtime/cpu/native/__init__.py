"""Attention over the paged KV pool: the kernel in C with its binding, and the numpy implementation that replaces it
where it was not built; `attention.py` chooses.
"""
