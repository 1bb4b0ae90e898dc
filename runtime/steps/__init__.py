"""Steps of the engine: which sequences and tokens a step computes, its batch, and what happens when it fails.

Blocks are in `ingot.runtime.kv`, the text and parameters of a request in `ingot.runtime.requests.request`.
"""
