"""The executor of launch programs on a GPU: device, memory, weights, programs, inputs; `executor.py` is the entry.

Other engines and libraries that run steps of such a program are here too. Nothing here imports the compiler.
"""
