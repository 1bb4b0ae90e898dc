"""Passes that every target begins with: they fold constants, clean up, and fuse nodes, without changing the outputs.

Ops that only one engine has belong to `lowering/`, unless their kernels exist on several.
"""
