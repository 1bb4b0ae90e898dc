"""Lowers nodes of the IR to launches, a module for each kind of node.

What they share is in lowering_context.py; lowering.py chooses among them.
"""
