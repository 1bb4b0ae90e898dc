"""Stages of a native program in processes of their own: how it is cut, the memory that they share, their supervision.

What a stage computes is in native/; stages within the engine's process are native/staged_program.py.
"""
